"""Detection of requests that a client repeated, among the turns of a session.

Pure functions; the order of arrival makes no difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import heappop, heappush
from itertools import groupby

from headrace_collector.facts import TurnFacts


def superseded_turns(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Return the turns that a retry of the same request replaced: id of the turn to id of the retry.

    A retry has the digest of the request that it repeats and a higher retry count, and replaces at most one turn:
    parallel samples have equal digests too, and all of them stay. An answer that the client continued was not
    superseded. Among several possible turns, the undelivered one is taken, else the one that was captured last.

    The work for each turn is logarithmic in their number, because a client may send any number of equal requests.

    Clients that do not count their retries are recognised by `repeats`, which the gateway sets where the client may not
    have got the answer. If the first answer was delivered, only a later turn of a named session can show that the
    client used the second answer instead.
    """
    continued = {digest for turn in turns for digest in turn.prefixes}
    retries: dict[str, str] = {}
    for attempts in _by_request(turns):
        candidates = _Attempts(continued, sorted(turn.turn_id for turn in attempts))
        ordered = sorted(attempts, key=lambda turn: (turn.retry, turn.order))
        for _, equal_counts in groupby(ordered, key=lambda turn: turn.retry):
            repeated = list(equal_counts)
            for retry in repeated:
                superseded = candidates.take(retry)
                if superseded is not None:
                    retries[superseded] = retry.turn_id
            for turn in repeated:
                candidates.add(turn)
    return retries | _uncounted_retries(turns, continued, retries)


_Rated = tuple[bool, int, int, int, str]
"""Sort key of an attempt (best attempt first), followed by its turn id."""


class _Attempts:
    """Earlier attempts at one request, from which the one that a retry replaces is chosen."""

    def __init__(self, continued: Set[bytes], turn_ids: Sequence[str]) -> None:
        self._continued = continued
        self._rank = {turn_id: rank for rank, turn_id in enumerate(turn_ids)}
        self._unused: list[_Rated] = []
        """Heap of the attempts that were not delivered, or whose answers no turn continues; the best one is first."""
        self._used: dict[bytes, dict[frozenset[bytes], list[_Rated]]] = defaultdict(dict)
        """Heaps of the other attempts, by their smallest continued answer and by all their continued answers."""

    def add(self, turn: TurnFacts) -> None:
        """Add an attempt that a retry with a higher count may replace."""
        used = frozenset(reply for reply in turn.replies if reply in self._continued) if turn.delivered else frozenset()
        heap = self._used[min(used)].setdefault(used, []) if used else self._unused
        rank = self._rank[turn.turn_id]
        heappush(heap, (turn.delivered, -turn.retry, -turn.log_offset, -rank, turn.turn_id))

    def take(self, retry: TurnFacts) -> str | None:
        """Remove and return the turn that `retry` replaces.

        A continued answer may be replaced if the answer to the retry is equal, because the client may have continued
        the latter.
        """
        replies = set(retry.replies)
        heaps = [self._unused]
        if not self._unused or self._unused[0][0]:
            heaps += [heap for reply in replies for used, heap in self._used.get(reply, {}).items() if used <= replies]
        best = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return None if best is None else heappop(best)[-1]


def _uncounted_retries(turns: Sequence[TurnFacts], continued: Set[bytes], counted: Mapping[str, str]) -> dict[str, str]:
    by_id = {turn.turn_id: turn for turn in turns}
    retries: dict[str, str] = {}
    for retry in sorted(turns, key=lambda turn: turn.order):
        earlier = by_id.get(retry.repeats or "")
        if earlier is None or earlier.turn_id in counted or earlier.request_digest != retry.request_digest:
            continue
        is_used = any(reply in continued and reply not in retry.replies for reply in earlier.replies)
        is_replaced = retry.explicit and not is_used and not continued.isdisjoint(retry.replies)
        if not earlier.delivered or is_replaced:
            retries[earlier.turn_id] = retry.turn_id
    return retries


def _by_request(turns: Iterable[TurnFacts]) -> Iterable[list[TurnFacts]]:
    groups: dict[str, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        groups[turn.request_digest].append(turn)
    return groups.values()
