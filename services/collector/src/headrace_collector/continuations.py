"""Answers that a turn of a session may continue, and the choice among equal answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from heapq import heappush, heapreplace

from headrace_collector.facts import TurnContent, TurnFacts

Label = tuple[object, ...]
"""Value that the turns of one run share."""

Reply = tuple[TurnFacts, int]
"""A turn and the index of one of its choices."""

_Evidence = tuple[bytes, frozenset[str]]
"""Tokens of a conversation with its answer, and the ids of its tool calls."""
_Candidate = tuple[bool, int, int, str, int, TurnFacts]
"""Sort key of an answer (best answer first), followed by the answer's turn."""


class EqualReplies:
    """Answers to equal conversations, among which the parent of a new turn is chosen.

    Answers that have equal tokens and tool call ids share one heap.
    """

    def __init__(self) -> None:
        self.labels: set[Label] = set()
        self._heaps: dict[_Evidence | None, list[_Candidate]] = defaultdict(list)
        self._new_turn_ids: list[str] = []

    def add(self, turn: TurnFacts, choice: int, label: Label, content: TurnContent | None) -> None:
        """Add an answer, with the label of the run to which its turn belongs."""
        self.labels.add(label)
        self._new_turn_ids.append(turn.turn_id)
        evidence = None if content is None else (content.sequences[choice], content.call_ids(choice))
        candidate = turn.trajectory_id is not None, 0, turn.log_offset, turn.turn_id, choice, turn
        heappush(self._heaps[evidence], candidate)

    def take_new_turn_ids(self) -> list[str]:
        """Return the ids of the turns that were added since the last call of this method."""
        turn_ids, self._new_turn_ids = self._new_turn_ids, []
        return turn_ids

    def best(self, content: TurnContent | None, continued: Mapping[tuple[str, int], int]) -> Reply | None:
        """Return the answer that a turn with this content continues, or None if there is none.

        Args:
            content: content of the turn, as far as it is known.
            continued: number of turns that already continue each answer.
        """
        by_evidence: dict[tuple[int, int], list[list[_Candidate]]] = defaultdict(list)
        for evidence, heap in self._heaps.items():
            strength = 0, 0
            if content is not None and evidence is not None:
                strength = content.shared_calls(evidence[1]), content.shared_bytes(evidence[0])
            by_evidence[strength].append(heap)
        if not by_evidence:
            return None
        heaps = by_evidence[max(by_evidence)]
        for heap in heaps:
            while (count := continued[heap[0][3], heap[0][4]]) > heap[0][1]:
                heapreplace(heap, (heap[0][0], count, *heap[0][2:]))
        *_, choice, turn = min(heap[0] for heap in heaps)
        return turn, choice
