"""Builds the branches (token sequences) of a run: a turn continues another turn only by an exact token prefix.

Each choice of a turn is a node. Its parent is the node with the longest token sequence that is a prefix of the prompt
of the node's turn. So a rewritten history, a compaction or a sub-agent starts a new sequence. At a fork, the child with
the longest continuation that has logprobs extends the sequence. Each other child starts a new sequence that repeats the
prefix as context. So a sampled token lies in exactly one span of exactly one branch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_collector.prompts import Prompts, Vertex
from headrace_schemas import Branch, Choice, Dialogue, Span, TokenGrammar, Turn
from headrace_schemas.events.trajectory import NoLogprobs
from headrace_schemas.rules.training import no_logprobs_reason
from headrace_schemas.rules.turn_history import token_ids_of


@dataclass(slots=True)
class _Node:
    turn: Turn
    choice: Choice
    prompt: Vertex
    sequence: Vertex
    no_logprobs: NoLogprobs | None
    children: list[_Node] = field(default_factory=list)
    longest: tuple[int, int] = field(init=False)
    """Length of the longest sequence through this node that ends with logprobs, and of the longest of all."""

    @property
    def order(self) -> tuple[object, ...]:
        return (self.turn.started_at, self.turn.turn_id, self.choice.index)


def build_branches(turns: Sequence[Turn], prompts: Prompts | None = None) -> tuple[list[Branch], list[Dialogue]]:
    """Return the branches of a run and the dialogue of each.

    Branches with logprobs come first, in the order of their first token that has one. The order of `turns` does not
    matter.

    Args:
        turns: the turns of the run.
        prompts: the prompts of these turns; by default they are built from the turns.
    """
    prompts = prompts or Prompts(turns)
    sequences = sorted(_sequences(_roots(_nodes(turns, prompts))), key=_sequence_order)
    return [_branch(sequence) for sequence in sequences], [_dialogue(sequence, prompts) for sequence in sequences]


def _sequence_order(sequence: Sequence[_Node]) -> tuple[object, ...]:
    sampled = next((node.order for node in sequence if node.no_logprobs is None), None)
    return (False, *sampled) if sampled is not None else (True, *sequence[0].order)


def _nodes(turns: Sequence[Turn], prompts: Prompts) -> list[_Node]:
    nodes = []
    for turn in turns:
        prompt, no_logprobs = prompts.prompt(turn.turn_id), no_logprobs_reason(turn)
        for choice, sequence in zip(turn.choices, prompts.answers(turn.turn_id), strict=True):
            if choice.token_ids:
                nodes.append(_Node(turn, choice, prompt, sequence, no_logprobs))
    return sorted(nodes, key=lambda node: (node.prompt.length, node.order))


def _roots(nodes: Sequence[_Node]) -> list[_Node]:
    """Link each node to its parent, and return the nodes without one. `nodes` are sorted so that parents come first."""
    roots: list[_Node] = []
    parent_of: dict[str, _Node | None] = {}
    continued: Counter[int] = Counter()
    by_end: dict[int, list[_Node]] = defaultdict(list)
    for node in nodes:
        by_end[id(node.sequence)].append(node)
    for node in nodes:
        turn_id = node.turn.turn_id
        if turn_id not in parent_of:  # the choices of one turn have one parent
            parent = parent_of[turn_id] = _parent(node, by_end, continued)
            continued[id(parent)] += 1
        parent = parent_of[turn_id]
        (roots if parent is None else parent.children).append(node)
    for node in reversed(nodes):
        own_length = (0 if node.no_logprobs else node.sequence.length, node.sequence.length)
        node.longest = max([own_length, *(child.longest for child in node.children)])
    return roots


def _parent(node: _Node, by_end: Mapping[int, Sequence[_Node]], continued: Counter[int]) -> _Node | None:
    """Return the node whose sequence is the longest prefix of the prompt of `node`, or None without one.

    Among nodes with equal sequences, the one that was continued least is chosen.

    Args:
        node: a choice of a turn.
        by_end: all nodes by the vertex at which their sequence ends.
        continued: number of times that each node was continued.
    """
    for vertex in node.prompt.ancestors():
        if id(vertex) in by_end:
            return min(by_end[id(vertex)], key=lambda other: (continued[id(other)], other.order))
    return None


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
    grammars: dict[TokenGrammar, int] = {}
    spans = tuple(_span(node, grammars) for node in sequence)
    token_ids = token_ids_of(sequence[-1].sequence.sequence())
    return Branch(token_ids=token_ids, spans=spans, grammars=tuple(grammars))


def _span(node: _Node, grammars: dict[TokenGrammar, int]) -> Span:
    """Return the span of a choice. If its grammar is new to the branch, add it to `grammars` with the next index.

    A choice with stored token sets gets no grammar, because the sets already contain the grammar's effect.
    """
    turn, choice, no_logprobs = node.turn, node.choice, node.no_logprobs
    sampled = no_logprobs is None
    stored_sets = choice.stored_sets if sampled and turn.sampling.truncated else None
    grammar = turn.token_grammar if sampled and turn.sampling.grammar and stored_sets is None else None
    return Span(
        start=node.prompt.length,
        logprobs=choice.logprobs if sampled else (0.0,) * len(choice.token_ids),
        turn_id=turn.turn_id,
        choice=choice.index,
        version=turn.version,
        temperature=turn.sampling.temperature if sampled else 1.0,
        finish_reason=choice.finish_reason,
        no_logprobs=no_logprobs,
        grammar=None if grammar is None else grammars.setdefault(grammar, len(grammars)),
        stored_sets=stored_sets,
        logit_shift=turn.sampling.logit_shift if sampled else None,
    )


def _dialogue(sequence: Sequence[_Node], prompts: Prompts) -> Dialogue:
    last = sequence[-1]
    return Dialogue(messages=(*prompts.messages(last.turn.turn_id), last.choice.message))
