"""Rows of the read model in memory, and the table of names, which gives repeated texts a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model import tables

EDITS_MAX = 100
"""Largest number of edits of a session whose digests are stored, so that a withdrawal can be matched."""


@dataclass(slots=True)
class SessionRow:
    """Row of one session: its model, its times, the counts of its turns by status, its reward and its thumb."""

    id: int
    session_key: str
    tenant: int
    session_id: str | None = None
    model: int = 0
    version: int = 0
    began_ms: int = 0
    last_ms: int = 0
    turns: int = 0
    tokens: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: int = 0
    status: int = 0
    reward: float | None = None
    thumb: int | None = None
    flags: int = 0
    task_id: str | None = None
    title: str | None = None
    edits: Sequence[str] = ()
    """Digests of the valid edits of the session's answers, at most `EDITS_MAX`."""
    read_day: int = 0


@dataclass(slots=True)
class TurnRow:
    """A turn, or a stub of a turn whose id is known only from later events.

    The row in the table has only the end of the name. The beginning, and the tenant, are in the row of the session.
    """

    id: int
    name: bytes
    tenant: int
    session: int = 0
    model: int = 0
    version: int = 0
    at_ms: int = 0
    partition: int = 0
    log_offset: int = -1
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    eval: bool = False
    refused: bool = False
    untrained: int | None = None
    no_logprobs: int | None = None
    status: int = 0
    finish: int | None = None
    latency_ms: int = 0
    arm: int | None = None
    choices: int = 1
    trajectories: tuple[int, ...] = ()
    experiences: tuple[int, ...] = ()

    @property
    def is_captured(self) -> bool:
        """Whether the turn's own event was read; False for a turn that is known only by events which refer to it."""
        return self.log_offset >= 0


@dataclass(slots=True)
class TrajectoryRow:
    """A trajectory, or a stub of a trajectory whose id is known only from rewards."""

    id: int
    name: bytes
    session: int = 0
    model: int = 0
    partition: int = 0
    log_offset: int = -1
    eval: bool = False
    ingested: bool = False
    refused: bool = False
    untrained: int | None = None
    turns: tuple[int, ...] = ()
    left_out: Mapping[int, int] = field(default_factory=dict)
    """Number of the reason by turn."""
    no_logprobs: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class ExperienceRow:
    """The newest revision of an experience with its outcomes, or a stub if only its outcomes were read."""

    id: int
    name: bytes
    session: int = 0
    revision: int = -1
    partition: int = 0
    log_offset: int = -1
    reward: float | None = None
    no_reward: int | None = None
    weight: float = 1.0
    refused: bool = False
    turns: tuple[int, ...] = ()
    history: Sequence[Sequence[Any]] = ()
    """Entries of the column of this name. A change replaces the whole sequence."""
    read_day: int = 0
    event: bytes | None = None
    """Packed event id of the newest revision, or None if the batch does not need it. It is not stored."""


@dataclass(slots=True)
class LetterRow:
    """A dead letter with its newest decision, or a stub if only its decisions were read."""

    id: int
    name: bytes
    subject: bytes = b""
    service: int = 0
    topic: int = 0
    reason: int = 0
    error: str = ""
    at_ms: int = 0
    partition: int = 0
    log_offset: int = -1
    state: int = 0
    decisions: int = 0
    read_day: int = 0


NAMES_MAX = 100_000
"""Number of stored texts from which on new sources and versions share the number of `OTHER`."""
_REASONS_MAX = 10_000
"""Number of further texts beyond which new reasons and other words of events share one number too."""
_IDENTITIES_MAX = 10_000
"""Number of further texts from which on a new tenant, model or lineage is refused."""
OTHER = "(other)"


class NameTableFull(Exception):
    """Raised for a record with a new tenant, model or lineage when the table of names has its maximum of rows. The
    record cannot be stored.
    """


class Names:
    """Table of texts, such as names of tenants and models, that rows refer to by number, from 1 on.

    A batch must call `refresh` first and `store` at its end.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._stored_until = 0

    def number(self, text: str) -> int:
        """Return the number of a tenant, a model or a lineage, or assign the next free number.

        Raises:
            NameTableFull: there are too many texts. Rows of different tenants, models and lineages must not be merged.
        """
        number = self._ids.get(text)
        if number is None:
            most = NAMES_MAX + _REASONS_MAX + _IDENTITIES_MAX
            if len(self._texts) >= most:
                raise NameTableFull(
                    f"console: {most} names are stored, so {text[:100]!r} gets no number and its records are skipped; "
                    "delete the console's database, so that names that are no longer used are dropped"
                )
            number = self._add(text)
        return number

    def shared_number(self, text: str, *, is_open: bool = False, other: str = OTHER) -> int:
        """Return the number of a text. Once the table is full, all new texts share the number of `other`.

        Args:
            text: the text.
            is_open: whether the text is a source or a version. Their number is unbounded, so their limit is lower,
                which reserves numbers for reasons.
            other: the text that stands for all texts beyond the limit.
        """
        number = self._ids.get(text)
        if number is None and len(self._texts) >= NAMES_MAX + (0 if is_open else _REASONS_MAX):
            number, text = self._ids.get(other), other
        return self._add(text) if number is None else number

    def _add(self, text: str) -> int:
        number = len(self._texts) + 1
        self._ids[text], self._texts[number] = number, text
        return number

    def text(self, number: int) -> str:
        """Return the text that has this number."""
        return self._texts[number]

    async def refresh(self, tx: AsyncConnection) -> None:
        """Update the cache of texts and their numbers from the database.

        Numbers assigned since the last call are dropped, because their transaction may have been rolled back; then the
        texts that were committed since that call are loaded.
        """
        for number in range(self._stored_until + 1, len(self._texts) + 1):
            del self._ids[self._texts.pop(number)]
        table = tables.names
        for row in await tx.execute(select(table).where(table.c.id > self._stored_until).order_by(table.c.id)):
            self._ids[row.name], self._texts[row.id] = row.id, row.name
        self._stored_until = len(self._texts)

    async def store(self, tx: AsyncConnection) -> None:
        """Insert new texts in the table. They count as stored after the next `refresh`, when the transaction was
        committed.
        """
        new = [{"id": n, "name": self._texts[n]} for n in range(self._stored_until + 1, len(self._texts) + 1)]
        if new:
            await tx.execute(insert(tables.names), new)
