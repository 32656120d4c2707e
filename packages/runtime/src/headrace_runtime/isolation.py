"""Isolates the items of a step: an item that fails is tried three times and then fails by name; the others go on.

A step first works over all its items in one transaction. When that raises, `Processor` rolls it back and runs the step
again on a connection that is marked as isolating: `each` then gives every item a savepoint of its own. The three tries
and the failure are one transaction, so a process that dies in between has changed nothing, and no item stays behind
that would fail again after the restart.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.database import is_passing
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import ITEMS_FAILED
from headrace_schemas import Event
from headrace_schemas.base import problems_of
from headrace_schemas.text import storable

log = get_logger(__name__)
TRIES = 3
"""How often an item is tried before it fails by name."""
_REASON_LENGTH_MAX = 2_000
_ENCODE = "headrace_encode_alone"
T = TypeVar("T")
Encode = Callable[[Sequence[Event]], Awaitable[object]]
Fail = Callable[[T, str], Awaitable[Sequence[Event]]]
"""Fails an item by name, for a reason."""


def reason_of(error: BaseException) -> str:
    """Return the type and the text of `error`, as UTF-8 and PostgreSQL can store it. Never raises.

    Of a `ValidationError` it names the fields, never their values: they may be somebody's text.
    """
    try:
        text = f"{type(error).__name__}: {problems_of(error) if isinstance(error, ValidationError) else error}"
    except Exception:  # noqa: BLE001 (an exception may define any `__str__`)
        text = type(error).__name__
    return storable(text[:_REASON_LENGTH_MAX])


def is_fatal(error: Exception) -> bool:
    """Return whether `error` is no item's fault: something is away, or a setting is wrong."""
    return isinstance(error, Unavailable | SettingError) or is_passing(error)


class Isolated:
    """Failures in a row of items that are worked on outside of a step: a model, a rollout, a table's record.

    The item that fails is tried at the next rounds. `run` names it after three tries; the caller goes on in any case.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures: Counter[str] = Counter()

    async def run(
        self,
        item: str,
        work: Callable[[], Awaitable[T]],
        otherwise: T,
        fail: Callable[[str], Awaitable[object]] | None = None,
    ) -> T:
        """Return what `work` returns, or `otherwise` when it raises. `fail` gets the reason of the third failure."""
        try:
            outcome = await work()
        except Exception as error:
            if is_fatal(error):
                raise
            await self._note(item, error, fail)
            return otherwise
        self._failures.pop(item, None)
        return outcome

    async def _note(self, item: str, error: Exception, fail: Callable[[str], Awaitable[object]] | None) -> None:
        frames = traceback.format_tb(error.__traceback__, limit=-5)
        log.warning("item_fails", step=self._name, item=item, kind=type(error).__name__, frames=frames)
        self._failures[item] += 1
        if self._failures[item] % TRIES:
            return
        ITEMS_FAILED.labels(self._name).inc()
        log.error("item_failed", step=self._name, item=item, tries=TRIES, kind=type(error).__name__)
        if fail is not None:
            try:
                await fail(reason_of(error))
            except Exception as worse:
                if is_fatal(worse):
                    raise
                log.error("item_not_named", step=self._name, item=item, kind=type(worse).__name__)


async def isolate(tx: AsyncConnection, encode: Encode) -> None:
    """Mark the connection of `tx`, so that `each` isolates. `encode` must raise for events that cannot be sent."""
    await tx.execution_options(**{_ENCODE: encode})


async def each(
    tx: AsyncConnection,
    name: str,
    items: Iterable[T],
    work: Callable[[T], Awaitable[Sequence[Event]]],
    *fails: Fail[T],
) -> list[Event]:
    """Run `work` for each item and return the events of all.

    Args:
        tx: transaction of the step. `work` and `fail` must change tables through it alone.
        name: name of the step, for log and metric.
        work: must be repeatable: what it changes in memory is not rolled back.
        fails: called with the item and the reason once all tries failed, one after the other until one does not raise.
            They must remove the item from what the step selects, and return the events that name it (a dead letter, a
            failed reward). The last should be too simple to raise.

    Raises:
        Exception: of `work`, unless `tx` is isolating; then only what `is_fatal`.
    """
    encode = _encoder(tx)
    events: list[Event] = []
    for item in items:
        if encode is None:
            events += await work(item)
        else:
            events += await _alone(tx, name, item, work, fails, encode)
    return events


def _encoder(tx: AsyncConnection) -> Encode | None:
    encode: Encode | None = tx.sync_connection.get_execution_options().get(_ENCODE) if tx.sync_connection else None
    return encode


async def _alone(
    tx: AsyncConnection,
    name: str,
    item: T,
    work: Callable[[T], Awaitable[Sequence[Event]]],
    fails: Sequence[Fail[T]],
    encode: Encode,
) -> Sequence[Event]:
    reason = ""
    for _ in range(TRIES):
        try:
            return await _in_savepoint(tx, lambda: work(item), encode)
        except Exception as error:
            if is_fatal(error):
                raise
            reason = reason_of(error)
            frames = traceback.format_tb(error.__traceback__, limit=-5)  # the message itself may quote somebody's text
            log.warning("item_fails", step=name, kind=type(error).__name__, frames=frames)
    ITEMS_FAILED.labels(name).inc()
    log.error("item_failed", step=name, tries=TRIES, kind=reason.partition(":")[0])
    for fail in fails:
        try:
            return await _in_savepoint(tx, lambda fail=fail: fail(item, reason), encode)  # type: ignore[misc]
        except Exception as error:
            if is_fatal(error):
                raise
            frames = traceback.format_tb(error.__traceback__, limit=-5)
            log.error("item_not_named", step=name, kind=type(error).__name__, frames=frames)
    return ()


async def _in_savepoint(
    tx: AsyncConnection, work: Callable[[], Awaitable[Sequence[Event]]], encode: Encode
) -> Sequence[Event]:
    async with tx.begin_nested():
        events = await work()
        await encode(events)
        return events


__all__ = ["TRIES", "Isolated", "each", "is_fatal", "isolate", "reason_of"]
