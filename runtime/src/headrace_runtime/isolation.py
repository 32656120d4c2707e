"""Isolates the items of a step: an item that fails is tried three times and then fails by name; the others go on.

A step first works over all its items in one transaction. When that raises, `Processor` rolls it back and runs the step
again on a connection that is marked as isolating: `each` then gives every item a savepoint of its own. The three tries
and the failure are one transaction, so a process that dies in between has changed nothing, and no item stays behind
that would fail again after the restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.database import is_passing
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import ITEMS_FAILED
from headrace_schemas import Event
from headrace_schemas.text import printable, storable

log = get_logger(__name__)
TRIES = 3
"""How often an item is tried before it fails by name."""
_REASON_LENGTH_MAX = 2_000
_ENCODE = "headrace_encode_alone"
T = TypeVar("T")
Encode = Callable[[Sequence[Event]], Awaitable[object]]


def reason_of(error: BaseException) -> str:
    """Return the type and the text of `error`, as UTF-8 and PostgreSQL can store it. Never raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (an exception may define any `__str__`)
        text = type(error).__name__
    return storable(text[:_REASON_LENGTH_MAX])


def is_fatal(error: Exception) -> bool:
    """Return whether `error` is no item's fault: something is away, or a setting is wrong."""
    return isinstance(error, Unavailable | SettingError) or is_passing(error)


async def isolate(tx: AsyncConnection, encode: Encode) -> None:
    """Mark the connection of `tx`, so that `each` isolates. `encode` must raise for events that cannot be sent."""
    await tx.execution_options(**{_ENCODE: encode})


async def each(
    tx: AsyncConnection,
    name: str,
    items: Iterable[T],
    work: Callable[[T], Awaitable[Sequence[Event]]],
    fail: Callable[[T, str], Awaitable[Sequence[Event]]],
) -> list[Event]:
    """Run `work` for each item and return the events of all.

    Args:
        tx: transaction of the step. `work` and `fail` must change tables through it alone.
        name: name of the step, for log and metric.
        work: must be repeatable: what it changes in memory is not rolled back.
        fail: called with the item and the reason once all tries failed. It must remove the item from what the step
            selects, and return the events that name it (a dead letter, a failed reward).

    Raises:
        Exception: of `work`, unless `tx` is isolating; then only what `is_fatal`.
    """
    encode = _encoder(tx)
    events: list[Event] = []
    for item in items:
        if encode is None:
            events += await work(item)
        else:
            events += await _alone(tx, name, item, work, fail, encode)
    return events


def _encoder(tx: AsyncConnection) -> Encode | None:
    encode: Encode | None = tx.sync_connection.get_execution_options().get(_ENCODE) if tx.sync_connection else None
    return encode


async def _alone(
    tx: AsyncConnection,
    name: str,
    item: T,
    work: Callable[[T], Awaitable[Sequence[Event]]],
    fail: Callable[[T, str], Awaitable[Sequence[Event]]],
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
            log.warning("item_fails", step=name, error=printable(reason, 500), exc_info=True)
    ITEMS_FAILED.labels(name).inc()
    log.error("item_failed", step=name, tries=TRIES, error=printable(reason, 500))
    try:
        return await _in_savepoint(tx, lambda: fail(item, reason), encode)
    except Exception as error:
        if is_fatal(error):
            raise
        log.exception("item_not_named", step=name, error=printable(reason_of(error), 500))
        return ()


async def _in_savepoint(
    tx: AsyncConnection, work: Callable[[], Awaitable[Sequence[Event]]], encode: Encode
) -> Sequence[Event]:
    async with tx.begin_nested():
        events = await work()
        await encode(events)
        return events


__all__ = ["TRIES", "each", "is_fatal", "isolate", "reason_of"]
