"""Which turns an SDK repeated, so that only the delivered one is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from headrace_collector.facts import TurnFacts


def superseded(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Turn that was given up to the retry that took its place.

    A retry has the digest of what it repeats and a higher retry count, and takes the place of at most one turn:
    parallel samples have equal digests too, and all stay. An answer that the client went on from was not given up.
    Among several that may have been, it is the undelivered one, else the one that was captured last.
    """
    continued = {digest for turn in turns for digest in turn.prefixes}
    found: dict[str, str] = {}
    for same in _by_request(turns):
        for retry in sorted(same, key=lambda turn: turn.order):
            used = continued.difference(retry.replies)  # an equal answer to the retry says nothing about which was used
            given_up = [
                turn
                for turn in same
                if turn.retry < retry.retry
                and turn.turn_id not in found
                and not (turn.delivered and not used.isdisjoint(turn.replies))
            ]
            if given_up:
                likeliest = max(given_up, key=lambda turn: (not turn.delivered, turn.retry, turn.place, turn.turn_id))
                found[likeliest.turn_id] = retry.turn_id
    return found


def _by_request(turns: Iterable[TurnFacts]) -> Iterable[list[TurnFacts]]:
    groups: dict[str, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        groups[turn.request_digest].append(turn)
    return groups.values()
