"""The branch graph: what continues what, by exact token prefix and by nothing else.

Each choice of a turn is a node. Its parent is the node with the longest token sequence that its turn's prompt begins
with, so a template that rewrites history, a compaction or a sub-agent starts a sequence of its own. The forest falls
into lines: of a node's children one carries its line on, each other one forks a new line that holds what went before as
context. So a sampled token lies in exactly one span of exactly one branch (P2), however the conversation forked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_schemas import Branch, Choice, Dialogue, Span, Turn


@dataclass(slots=True)
class _Node:
    turn: Turn
    choice: Choice
    prompt: bytes
    """Token ids as int32: prefixes of sequences are prefixes of bytes."""
    sequence: bytes
    trainable: bool
    children: list[_Node] = field(default_factory=list)
    reach: tuple[int, int] = field(init=False)
    """Length of the longest trainable sequence from here on, and of the longest at all."""

    @property
    def born(self) -> tuple[object, ...]:
        return (self.turn.started_at, self.turn.turn_id, self.choice.index)


def pack(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def branches(turns: Sequence[Turn]) -> tuple[list[Branch], list[Dialogue]]:
    """The branches of a run in the order of their first sampled token, and the dialogue of each.

    Turns that cannot be trained are context; lines that hold nothing else give further dialogues and no branch.
    Independent of the order of `turns`.
    """
    lines = _lines(_roots(_nodes(turns)))
    trained = [line for line in lines if any(node.trainable for node in line)]
    others = [line for line in lines if not any(node.trainable for node in line)]
    trained.sort(key=lambda line: next(node.born for node in line if node.trainable))
    others.sort(key=lambda line: line[0].born)
    return [_branch(line) for line in trained], [_dialogue(line) for line in (*trained, *others)]


def _nodes(turns: Sequence[Turn]) -> list[_Node]:
    nodes = []
    for turn in turns:
        prompt = pack(turn.prompt_token_ids)
        for choice in turn.choices:
            if choice.token_ids:
                sequence = prompt + pack(choice.token_ids)
                nodes.append(_Node(turn, choice, prompt, sequence, turn.sampling.untruncated))
    return sorted(nodes, key=lambda node: (len(node.prompt), node.born))


def _roots(nodes: Sequence[_Node]) -> list[_Node]:
    """Link children to parents; `nodes` are sorted so that parents come first."""
    roots: list[_Node] = []
    parent_of: dict[str, _Node | None] = {}
    continued: Counter[int] = Counter()
    for position, node in enumerate(nodes):
        turn_id = node.turn.turn_id
        if turn_id not in parent_of:  # the choices of one turn have one parent
            parent = parent_of[turn_id] = _parent(node, nodes[:position], continued)
            continued[id(parent)] += 1
        parent = parent_of[turn_id]
        (roots if parent is None else parent.children).append(node)
    for node in reversed(nodes):
        own = (len(node.sequence) if node.trainable else 0, len(node.sequence))
        node.reach = max([own, *(child.reach for child in node.children)])
    return roots


def _parent(node: _Node, earlier: Sequence[_Node], continued: Counter[int]) -> _Node | None:
    """What is longest. Parallel samples that came out equal are continued in turn."""
    fitting = [other for other in earlier if node.prompt.startswith(other.sequence)]
    return min(fitting, key=lambda other: (-len(other.sequence), continued[id(other)], other.born), default=None)


def _lines(roots: Sequence[_Node]) -> list[list[_Node]]:
    lines = []
    starts = list(roots)
    while starts:
        node = starts.pop()
        line = [node]
        while node.children:
            node.children.sort(key=lambda child: child.born)
            heir = max(node.children, key=lambda child: child.reach)
            starts += [child for child in node.children if child is not heir]
            node = heir
            line.append(node)
        lines.append(line)
    return lines


def _branch(line: Sequence[_Node]) -> Branch:
    """Ends with its last trained token: what came after it teaches nothing."""
    trained = [node for node in line if node.trainable]
    last = trained[-1]
    spans = tuple(
        Span(
            start=len(node.turn.prompt_token_ids),
            logprobs=node.choice.logprobs,
            turn_id=node.turn.turn_id,
            choice=node.choice.index,
            version=node.turn.version,
            temperature=node.turn.sampling.temperature,
            finish_reason=node.choice.finish_reason,
        )
        for node in trained
    )
    return Branch(token_ids=last.turn.prompt_token_ids + last.choice.token_ids, spans=spans)


def _dialogue(line: Sequence[_Node]) -> Dialogue:
    last = line[-1]
    return Dialogue(messages=(*last.turn.messages, last.choice.message))
