"""Trinity's table of experiences: a batch is inserted as a whole, and only once.

The tables equal those that Trinity itself creates, column by column; the first of the two creates them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import (
    Column,
    DateTime,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from headrace_runtime.errors import Unavailable
from headrace_trainer.trinity_learner.rows import TrinityRow

_SQLITE, _POSTGRES = "sqlite://", "postgresql://"


class Buffer:
    """The tables `name` and `name`_blob in the database `url`."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url.replace(_SQLITE, "sqlite+aiosqlite://", 1).replace(_POSTGRES, "postgresql+asyncpg://", 1)
        self._name = name
        self._tables = MetaData()
        self._rows = Table(
            name,
            self._tables,
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("timestamp", DateTime, server_default=func.now()),
            Column("task_id", String(64), index=True),
            Column("run_id", Integer, index=True),
            Column("msg_id", String(64), index=True),
            Column("model_version", Integer, index=True),
            Column("reward", Float, index=True),
            Column("consumed", Integer, default=0, index=True),
        )
        self._blobs = Table(
            f"{name}_blob",
            self._tables,
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("experience_bytes", LargeBinary, nullable=False),
        )

    def hand_over(self, rows: Sequence[TrinityRow]) -> bool:
        """Insert a batch in one transaction. Return False when its rows are there already. Raises `Unavailable`.

        Blocks; must not be called in an event loop.
        """
        return asyncio.run(self._hand_over(rows))

    async def _hand_over(self, rows: Sequence[TrinityRow]) -> bool:
        engine = create_async_engine(self._url)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(self._tables.create_all)
            async with engine.begin() as connection:
                names = [row.msg_id for row in rows]
                existing = select(func.count()).where(self._rows.c.msg_id.in_(names))
                if (await connection.execute(existing)).scalar_one():
                    return False
                for row in rows:
                    values = {
                        "task_id": row.task_id,
                        "run_id": 0,
                        "msg_id": row.msg_id,
                        "model_version": row.model_version,
                        "reward": row.reward,
                        "consumed": 0,
                    }
                    result = await connection.execute(insert(self._rows).values(values))
                    (number,) = result.inserted_primary_key or (None,)
                    blob = {"id": number, "experience_bytes": row.experience_bytes}
                    await connection.execute(insert(self._blobs).values(blob))
                return True
        except (DBAPIError, OSError) as error:
            raise Unavailable(f"the batch could not be handed over to Trinity: {error}") from error
        finally:
            await engine.dispose()
