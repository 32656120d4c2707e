"""Finds turns that an SDK repeated, so that only the delivered one is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from headrace_collector.facts import TurnFacts


def superseded_turns(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Return for each superseded turn the retry that replaced it.

    A retry has the digest of the request that it repeats and a higher retry count, and replaces at most one turn:
    parallel samples have equal digests too, and all of them stay. An answer that the client continued was not
    superseded. Among several possible turns, the undelivered one is taken, else the one that was captured last.
    """
    continued = {digest for turn in turns for digest in turn.prefixes}
    retries: dict[str, str] = {}
    for attempts in _by_request(turns):
        for retry in sorted(attempts, key=lambda turn: turn.order):
            used_replies = continued.difference(
                retry.replies
            )  # an equal answer to the retry does not show which was used
            possible = [
                turn
                for turn in attempts
                if turn.retry < retry.retry
                and turn.turn_id not in retries
                and not (turn.delivered and not used_replies.isdisjoint(turn.replies))
            ]
            if possible:
                superseded = max(
                    possible, key=lambda turn: (not turn.delivered, turn.retry, turn.log_offset, turn.turn_id)
                )
                retries[superseded.turn_id] = retry.turn_id
    return retries


def _by_request(turns: Iterable[TurnFacts]) -> Iterable[list[TurnFacts]]:
    groups: dict[str, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        groups[turn.request_digest].append(turn)
    return groups.values()
