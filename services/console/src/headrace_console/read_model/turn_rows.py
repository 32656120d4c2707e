"""Turns of one batch. The row of a turn has the end of the turn's id, the row of its session has the beginning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import RowMapping, Select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables
from headrace_console.read_model.packing import join_turn, split_turn
from headrace_console.read_model.queries import turns_query
from headrace_console.read_model.rows import RowSet, SessionRow, TurnRow
from headrace_runtime.storage.tables import portions

_PAIRS_AT_ONCE = 40


class TurnSet(RowSet[TurnRow]):
    """Turns that a batch may change, by the packed id and the tenant."""

    def __init__(self, sessions: RowSet[SessionRow]) -> None:
        """Create an empty set. Before turns are loaded by key, `sessions` must contain their sessions."""
        super().__init__(tables.turns, TurnRow, ("name", "tenant"))
        self._sessions = sessions

    async def load_keys(self, tx: AsyncConnection, keys: Collection[tuple[Any, ...]]) -> None:
        """Load the turns with these packed ids and tenants."""
        in_sessions, foreign = [], []
        for name, tenant in keys:
            session_key, stored = split_turn(name)
            if session_key is None:
                foreign.append(stored)
            elif (session := self._sessions.find(session_key, tenant)) is not None:
                in_sessions.append((session.id, stored))
        await self._load_in_sessions(tx, in_sessions)
        await self._load_foreign(tx, foreign)

    async def load_names(self, tx: AsyncConnection, names: Iterable[bytes]) -> None:
        """Load the turns with these packed ids, of any tenant."""
        split = [split_turn(name) for name in names]
        keys = {session_key for session_key, _ in split if session_key is not None}
        numbers: dict[str, list[int]] = {}
        for session in await self._sessions.load_where(tx, "session_key", keys):
            numbers.setdefault(session.session_key, []).append(session.id)
        pairs = [(number, stored) for key, stored in split if key is not None for number in numbers.get(key, ())]
        await self._load_in_sessions(tx, pairs)
        await self._load_foreign(tx, [stored for key, stored in split if key is None])

    async def _load_in_sessions(self, tx: AsyncConnection, pairs: Iterable[tuple[int, bytes]]) -> None:
        """Load the turns with these stored names in these sessions.

        SQLite uses no index for pairs, so that each session is searched for each name of a portion. Small portions of
        sorted pairs keep these searches few.
        """
        for part in portions(sorted(set(pairs)), _PAIRS_AT_ONCE):
            sessions, names = {session for session, _ in part}, {name for _, name in part}
            query = self._query().where(tables.turns.c.session.in_(sessions), tables.is_named(tables.turns, names))
            self._add_loaded((await tx.execute(query)).mappings())

    async def _load_foreign(self, tx: AsyncConnection, names: Iterable[bytes]) -> None:
        for part in portions(set(names)):
            query = self._query().where(tables.IS_FOREIGN, tables.turns.c.name.in_(part))
            self._add_loaded((await tx.execute(query)).mappings())

    def _query(self) -> Select[Any]:
        return turns_query()

    def _read(self, mapping: RowMapping) -> dict[str, Any]:
        name = join_turn(mapping["session_key"], mapping["name"])
        return {**super()._read(mapping), "name": name, "tenant": mapping["tenant"]}

    def _write(self, values: Sequence[Any]) -> dict[str, Any]:
        record = super()._write(values)
        record["name"] = split_turn(record["name"])[1]
        return record
