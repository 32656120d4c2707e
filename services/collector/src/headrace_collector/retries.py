"""Finds turns whose request a client repeated, so that only the answer that it used is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from headrace_collector.facts import TurnFacts


def superseded_turns(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Return for each superseded turn the retry that replaced it.

    A retry has the digest of the request that it repeats and a higher retry count, and replaces at most one turn:
    parallel samples have equal digests too, and all of them stay. An answer that the client continued was not
    superseded. Among several possible turns, the undelivered one is taken, else the one that was captured last.

    Clients that do not count their retries are recognised by `repeats`, which the gateway sets where the client may not
    have got the answer. If it was delivered, only the conversation of a named session shows that the client used the
    answer to the repeated request and not the first one.
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
    return retries | _uncounted_retries(turns, continued, retries)


def _uncounted_retries(turns: Sequence[TurnFacts], continued: Set[bytes], counted: Mapping[str, str]) -> dict[str, str]:
    by_id = {turn.turn_id: turn for turn in turns}
    retries: dict[str, str] = {}
    for retry in sorted(turns, key=lambda turn: turn.order):
        earlier = by_id.get(retry.repeats or "")
        if earlier is None or earlier.turn_id in counted or earlier.request_digest != retry.request_digest:
            continue
        is_used = not (continued - set(retry.replies)).isdisjoint(earlier.replies)
        is_replaced = retry.explicit and not is_used and not continued.isdisjoint(retry.replies)
        if not earlier.delivered or is_replaced:
            retries[earlier.turn_id] = retry.turn_id
    return retries


def _by_request(turns: Iterable[TurnFacts]) -> Iterable[list[TurnFacts]]:
    groups: dict[str, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        groups[turn.request_digest].append(turn)
    return groups.values()
