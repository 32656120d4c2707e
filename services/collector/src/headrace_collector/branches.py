"""Builds the branches of a run: a turn continues another turn only by exact token prefix.

Each choice of a turn is a node. Its parent is the node with the longest token sequence that is a prefix of its turn's
prompt. So a rewritten history, a compaction or a sub-agent starts a new sequence. At a fork, the child with the longest
continuation that has logprobs extends the sequence. Each other child starts a new sequence that repeats the prefix as
context. So a sampled token lies in exactly one span of exactly one branch (P2).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_schemas import Branch, Choice, Dialogue, Span, Turn
from headrace_schemas.events.trajectory import NoLogprobs
from headrace_schemas.rules.training import no_logprobs_reason


@dataclass(slots=True)
class _Node:
    turn: Turn
    choice: Choice
    prompt: bytes
    """Token ids as int32, so that a prefix of a sequence is a prefix of its bytes."""
    sequence: bytes
    no_logprobs: NoLogprobs | None
    children: list[_Node] = field(default_factory=list)
    longest: tuple[int, int] = field(init=False)
    """Length of the longest sequence through this node that ends with logprobs, and of the longest of all."""

    @property
    def order(self) -> tuple[object, ...]:
        return (self.turn.started_at, self.turn.turn_id, self.choice.index)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return array("i", ids).tobytes()


def build_branches(turns: Sequence[Turn]) -> tuple[list[Branch], list[Dialogue]]:
    """Return the branches of a run and the dialogue of each, first those with logprobs, by their first token that has
    some.

    The order of `turns` makes no difference.
    """
    sequences = sorted(_sequences(_roots(_nodes(turns))), key=_sequence_order)
    return [_branch(sequence) for sequence in sequences], [_dialogue(sequence) for sequence in sequences]


def _sequence_order(sequence: Sequence[_Node]) -> tuple[object, ...]:
    sampled = next((node.order for node in sequence if node.no_logprobs is None), None)
    return (False, *sampled) if sampled is not None else (True, *sequence[0].order)


def _nodes(turns: Sequence[Turn]) -> list[_Node]:
    nodes = []
    for turn in turns:
        prompt, no_logprobs = pack_ids(turn.prompt_token_ids), no_logprobs_reason(turn)
        for choice in turn.choices:
            if choice.token_ids:
                sequence = prompt + pack_ids(choice.token_ids)
                nodes.append(_Node(turn, choice, prompt, sequence, no_logprobs))
    return sorted(nodes, key=lambda node: (len(node.prompt), node.order))


def _roots(nodes: Sequence[_Node]) -> list[_Node]:
    """Link children to their parents and return the nodes without a parent. `nodes` are sorted so that parents come
    first."""
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
        own_length = (0 if node.no_logprobs else len(node.sequence), len(node.sequence))
        node.longest = max([own_length, *(child.longest for child in node.children)])
    return roots


def _parent(node: _Node, earlier: Sequence[_Node], continued: Counter[int]) -> _Node | None:
    """Return the node with the longest sequence that is a prefix of the prompt. Equal parallel samples are continued in
    turn."""
    fitting = [other for other in earlier if node.prompt.startswith(other.sequence)]
    return min(fitting, key=lambda other: (-len(other.sequence), continued[id(other)], other.order), default=None)


def _sequences(roots: Sequence[_Node]) -> list[list[_Node]]:
    sequences = []
    starts = list(roots)
    while starts:
        node = starts.pop()
        sequence = [node]
        while node.children:
            node.children.sort(key=lambda child: child.order)
            successor = max(node.children, key=lambda child: child.longest)
            starts += [child for child in node.children if child is not successor]
            node = successor
            sequence.append(node)
        sequences.append(sequence)
    return sequences


def _branch(sequence: Sequence[_Node]) -> Branch:
    last = sequence[-1]
    spans = tuple(_span(node.turn, node.choice, node.no_logprobs) for node in sequence)
    return Branch(token_ids=last.turn.prompt_token_ids + last.choice.token_ids, spans=spans)


def _span(turn: Turn, choice: Choice, no_logprobs: NoLogprobs | None) -> Span:
    sampled = no_logprobs is None
    return Span(
        start=len(turn.prompt_token_ids),
        logprobs=choice.logprobs if sampled else (0.0,) * len(choice.token_ids),
        turn_id=turn.turn_id,
        choice=choice.index,
        version=turn.version,
        temperature=turn.sampling.temperature if sampled else 1.0,
        finish_reason=choice.finish_reason,
        no_logprobs=no_logprobs,
    )


def _dialogue(sequence: Sequence[_Node]) -> Dialogue:
    last = sequence[-1]
    return Dialogue(messages=(*last.turn.messages, last.choice.message))
