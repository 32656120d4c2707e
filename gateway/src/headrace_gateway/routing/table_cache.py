"""Copy of the rows of a compacted topic in a file, for a gateway that starts while the bus is unavailable.

Rows of the topic have precedence. The file is used only if reading the topic takes too long, and only until the topic
has been read; then rows that are not in the topic are dropped. Until the bus is available again, a version that was
withdrawn in the meantime is still served, as it would be by a gateway that had not been restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk
from headrace_runtime.storage.isolation import reason_of
from headrace_schemas import Event

log = get_logger(__name__)
E = TypeVar("E", bound=Event)
E_co = TypeVar("E_co", bound=Event, covariant=True)


class SourceTable(Protocol[E_co]):
    """Compacted topic whose rows the file contains. `headrace_runtime.kafka.consumer.TopicTable` implements it."""

    @property
    def loaded(self) -> asyncio.Event:
        """Event that is set once all rows that existed at the start have been read."""

    @property
    def rows(self) -> Mapping[str, E_co]:
        """Latest event of each key."""


class TableCache(Generic[E]):
    """File with a copy of one topic's rows. The task `run` reads the file if the bus is late, and rewrites it every
    `every_s` seconds.

    `update` is called for the rows of the file as for those of the topic. Rows for which `accepts` returns false are
    skipped.
    """

    def __init__(
        self,
        event: type[E],
        path: Path,
        table: SourceTable[E],
        update: Callable[[str, E | None], None],
        wait_s: float,
        accepts: Callable[[E], bool] = lambda _event: True,
    ) -> None:
        self._accepts = accepts
        self._event = event
        self._path = path
        self._table = table
        self._update = update
        self._wait_s = wait_s
        self._written = b""
        self.used = False
        """The file is used, or was used, in place of the topic."""

    async def run(self, every_s: float = 2.0) -> None:
        """Read the file if the bus is late, then rewrite it at intervals, until the task is cancelled."""
        rows: dict[str, E] = {}
        try:
            async with asyncio.timeout(self._wait_s):
                await self._table.loaded.wait()
        except TimeoutError:
            rows = await asyncio.to_thread(self._read)
            for key, row in rows.items():
                if key not in self._table.rows:
                    try:
                        self._update(key, row)
                    except Exception as error:  # noqa: BLE001 (one row must not keep the others back)
                        log.warning("row_is_damaged", file=self._path.name, error=reason_of(error))
            self.used = bool(rows)
            log.warning("bus_is_late", topic=self._event.topic, known_from_before=len(rows))
            await self._table.loaded.wait()
        for key in rows.keys() - self._table.rows.keys():
            self._update(key, None)
        while True:
            with contextlib.suppress(OSError):  # a full disk has its own alarm: the spool's
                await asyncio.to_thread(self._write, list(self._table.rows.values()))
            await asyncio.sleep(every_s)

    def _read(self) -> dict[str, E]:
        """Return the rows of the file. Damaged lines are skipped. Called in a thread."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return {}
        rows = {}
        for line in lines:
            try:
                row = self._event.from_stored(line)
            except Exception as error:  # noqa: BLE001 (the file may hold anything)
                log.warning("row_is_damaged", file=self._path.name, error=reason_of(error))
            else:
                if self._accepts(row):
                    rows[row.key] = row
        return rows

    def _write(self, rows: Iterable[E]) -> None:
        """Replace the file atomically by one with `rows`. Called in a thread."""
        text = b"".join(row.to_json() + b"\n" for row in rows)
        if text == self._written:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(self._path, text)
        self._written = text
