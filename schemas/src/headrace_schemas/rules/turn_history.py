"""Restoring the whole prompt of turns that refer to an earlier turn of their session.

A long session repeats its history in each call, so a turn may refer to an earlier turn of its session instead
(`Turn.extends`). A reader of `turns` that needs whole prompts passes each turn, in the order of the topic, to
`TurnHistory.whole_turn`. Turns that contain their whole prompt pass unchanged.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from headrace_schemas.events.turn import Turn
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import printable

UNRESOLVED = "unresolved_turn"
"""Reason of the `InvalidEvent`, and of the dead letter, of a turn with a reference that cannot be followed."""
TOKENS_MAX = 16_000_000
"""Maximum number of prompt tokens that a `TurnHistory` stores."""


class TurnHistory:
    """The last whole turns of one reader, bounded by their tokens. The least recently used turn is removed first."""

    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._turns: OrderedDict[tuple[str, str], Turn] = OrderedDict()

    def whole_turn(self, turn: Turn) -> Turn:
        """Return `turn` with its whole prompt, and store it for later turns of its session.

        Raises:
            InvalidEvent: `unresolved_turn`, the earlier turn was not read before or is not stored any more, or the
                reference does not fit it.
        """
        if turn.extends is not None:
            earlier = self._turns.get((turn.session_key, turn.extends.turn_id))
            if earlier is None:
                raise unresolved(turn, "that turn was not read before; read the session from an earlier offset")
            self._turns.move_to_end((turn.session_key, turn.extends.turn_id))
            turn = extend(earlier, turn)
        self._store(turn)
        return turn

    def _store(self, turn: Turn) -> None:
        key = (turn.session_key, turn.turn_id)
        replaced = self._turns.pop(key, None)
        self._tokens += turn.usage.prompt_tokens - (replaced.usage.prompt_tokens if replaced else 0)
        self._turns[key] = turn
        while self._tokens > self._tokens_max:
            self._tokens -= self._turns.popitem(last=False)[1].usage.prompt_tokens


def extend(earlier: Turn, turn: Turn) -> Turn:
    """Return `turn`, which extends `earlier`, with its whole prompt.

    Args:
        earlier: the turn that `turn.extends` names, with its whole prompt.
        turn: the turn.

    Raises:
        InvalidEvent: `unresolved_turn`, the reference does not fit the earlier turn.
    """
    reference = turn.extends
    if reference is None or reference.turn_id != earlier.turn_id or earlier.session_key != turn.session_key:
        raise unresolved(
            turn, f"the passed turn {earlier.turn_id!r} is another turn; pass that turn of the same session"
        )
    if earlier.extends is not None:
        raise unresolved(turn, "that turn lacks the beginning of its prompt itself; restore it first")
    if reference.choice >= len(earlier.choices):
        raise unresolved(turn, f"that turn has no choice {reference.choice}")
    choice = earlier.choices[reference.choice]
    shared = (earlier.prompt_token_ids + choice.token_ids)[: reference.tokens]
    if len(shared) != reference.tokens or token_digest(shared) != reference.digest:
        raise unresolved(turn, f"that turn does not begin with the {reference.tokens} shared token ids")
    messages = (*earlier.messages, choice.message)[: reference.messages]
    if len(messages) != reference.messages:
        raise unresolved(turn, f"that turn does not begin with the {reference.messages} shared messages")
    changes = {
        "extends": None,
        "messages": (*messages, *turn.messages),
        "prompt_token_ids": shared + turn.prompt_token_ids,
        "tools": earlier.tools if reference.tools else turn.tools,
    }
    return turn.model_copy(update=changes)


def unresolved(turn: Turn, problem: str) -> InvalidEvent:
    """Return the error of `turn`, whose reference to an earlier turn (`extends`) has this `problem`, a clause."""
    named = printable(turn.extends.turn_id) if turn.extends else None
    return InvalidEvent(UNRESOLVED, f"extends.turn_id = {named!r}: {problem}")


def token_digest(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(token_bytes(token_ids)).hexdigest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32. Raises `OverflowError` for an id beyond int32."""
    return _in_wire_order(array("i", token_ids)).tobytes()


def token_ids_of(packed: bytes) -> tuple[int, ...]:
    """Return the token ids that `token_bytes` packed."""
    return tuple(_in_wire_order(array("i", packed)))


def shared_bytes(data: bytes, position: int, other: bytes, unit: int) -> int:
    """Return the length of the longest common prefix of `data[position:]` and `other`, in bytes.

    Args:
        data: packed values.
        position: start of the comparison in `data`, in bytes.
        other: packed values.
        unit: bytes of one value. Only whole values count, except that all of `other` may be equal.
    """
    if data.startswith(other, position):
        return len(other)
    low, high = 0, min(len(other), len(data) - position) // unit
    while low < high:  # the first `low` units are equal, and not the first `high` + 1
        middle = (low + high + 1) // 2
        begin, end = low * unit, middle * unit
        if other[begin:end] == data[position + begin : position + end]:
            low = middle
        else:
            high = middle - 1
    return low * unit


def _in_wire_order(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
