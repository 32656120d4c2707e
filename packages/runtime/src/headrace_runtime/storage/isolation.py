"""Isolation of the items of a step: an item that fails is tried three times and then reported as failed, and all other
items are processed.

A step first processes all its items in one transaction. If that raises, `Processor` rolls it back and runs the step
again on a connection that is marked as isolating. Then `each` and `process_batch` process every item in a savepoint of
its own. The three tries and the report are one transaction, so a crash in between changes nothing, and no failing item
remains that would fail again after the restart.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.metrics import ITEMS_FAILED
from headrace_runtime.process.logs import get_logger
from headrace_schemas import Event
from headrace_schemas.values.base import problems_of
from headrace_schemas.values.text import storable

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

log = get_logger(__name__)
TRIES = 3
"""Number of tries of an item before it is reported as failed."""
_REASON_LENGTH_MAX = 2_000
_ENCODE = "headrace_encode_alone"
T = TypeVar("T")
Encode = Callable[[Sequence[Event]], Awaitable[object]]
Fail = Callable[[T, str], Awaitable[Sequence[Event]]]
"""Function that stores and reports the failure of an item. It gets the item and the reason, and returns events."""


def reason_of(error: BaseException) -> str:
    """Return type and text of `error`, cut to 2,000 characters and without characters that PostgreSQL cannot store.
    Never raises.

    For a `ValidationError` the text names the fields but not their values, which may be text of users.
    """
    try:
        text = f"{type(error).__name__}: {problems_of(error) if isinstance(error, ValidationError) else error}"
    except Exception:  # noqa: BLE001 (an exception may define any `__str__`)
        text = type(error).__name__
    return storable(text[:_REASON_LENGTH_MAX])


def is_fatal(error: Exception) -> bool:
    """Return whether the cause of `error` is not an item but an unavailable dependency or an invalid setting."""
    if isinstance(error, Unavailable | SettingError):
        return True
    if "sqlalchemy" not in sys.modules:  # services without a database do not install SQLAlchemy
        return False
    from headrace_runtime.storage.database import is_transient

    return is_transient(error)


class ItemIsolation:
    """Isolation of items that are processed outside of a step, for example models, rollouts or rows of a table.

    A failing item is tried again in the next rounds, and `run` reports it after three consecutive failures.
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
        """Run `work` for one item and return its result. If it raises, return `otherwise`, so that other items are not
        affected.

        Args:
            item: name of the item, by which its consecutive failures are counted.
            work: function that processes the item.
            otherwise: result after a failure.
            fail: function that is called with the reason after the third consecutive failure.
        """
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
    """Make later calls of `each` in `tx` process each item in a savepoint of its own. `encode` must raise for events
    that cannot be sent."""
    await tx.execution_options(**{_ENCODE: encode})


async def each(
    tx: AsyncConnection,
    name: str,
    items: Iterable[T],
    work: Callable[[T], Awaitable[Sequence[Event]]],
    *fails: Fail[T],
) -> list[Event]:
    """Run `work` for each item, and return the events of all items.

    Args:
        tx: transaction of the step. `work` and `fail` must change tables through it alone.
        name: name of the step, for log and metric.
        items: the items.
        work: function that processes one item. It must be repeatable, because changes in memory are not rolled back.
        fails: functions that get the item and the reason after the last try. They are called one after the other until
            one does not raise. Each must remove the item from the selection of the step and return events that report
            the failure (a dead letter, a failed reward). The last one should be too simple to raise.

    Raises:
        Exception: any exception of `work`, or only fatal ones (`is_fatal`) if `tx` is isolating.
    """
    encode = _encoder(tx)
    events: list[Event] = []
    for item in items:
        if encode is None:
            events += await work(item)
        else:
            events += await _process_alone(tx, name, item, work, fails, encode)
    return events


async def process_batch(
    tx: AsyncConnection,
    name: str,
    items: Sequence[T],
    work: Callable[[Sequence[T]], Awaitable[Sequence[Event]]],
    *fails: Fail[T],
) -> list[Event]:
    """Run `work` once for all items, so that it can read and write the rows of all items in a few statements.

    If `tx` isolates items, `work` runs for each item alone, as in `each`. The arguments are the same as those of
    `each`.
    """
    if _encoder(tx) is not None:
        return await each(tx, name, items, lambda item: work([item]), *fails)
    return [*await work(items)] if items else []


def _encoder(tx: AsyncConnection) -> Encode | None:
    encode: Encode | None = tx.sync_connection.get_execution_options().get(_ENCODE) if tx.sync_connection else None
    return encode


async def _process_alone(
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
            frames = traceback.format_tb(error.__traceback__, limit=-5)  # the message may quote user text
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


__all__ = ["TRIES", "ItemIsolation", "each", "is_fatal", "isolate", "process_batch", "reason_of"]
