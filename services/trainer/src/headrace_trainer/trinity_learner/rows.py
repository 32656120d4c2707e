"""A batch as rows of Trinity's `Experience`, written without importing Trinity, and Trinity's table of experiences,
into which it is inserted.

A row is a multi-turn sequence: the tokens from the first trained one on are the response, a mask marks the trained
ones, and logprobs and advantages have a number for each token of the response. The format is version 1 of Trinity's:
a magic word, two lengths, a pickle of plain values, and one safetensors blob.

Trinity's loss is a mean over the batch's tokens. The trainer's loss gives each token a weight, so advantages are scaled
to convert one into the other: the loss is linear in them. Rows that fill the batch up have an advantage of 0.

The tables equal those that Trinity itself creates, column by column; the first of the two creates them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
from headrace_trainer.batches.batch import Batch, Row

_MAGIC, _VERSION = b"TRXP", 1
_NAME_MAX = 64
"""Length of a task's name in Trinity's tables, in characters."""
_TYPES = {np.dtype("<i4"): "I32", np.dtype("<f4"): "F32", np.dtype("?"): "BOOL"}
_SQLITE, _POSTGRES = "sqlite://", "postgresql://"


@dataclass(frozen=True, slots=True)
class TrinityRow:
    """One row of Trinity's two tables."""

    task_id: str
    msg_id: str
    """The batch, and the index of the row in it."""
    model_version: int
    reward: float
    experience_bytes: bytes


def rows_of(batch: Batch, temperature: float, size: int, step: int) -> tuple[list[TrinityRow], frozenset[str]]:
    """Convert a batch to `size` rows for Trinity's step after `step`. Also return the names of rows that were left out.

    Rows are left out if they were sampled at another temperature, or from a part of the vocabulary.
    """
    digest = batch.digest()
    out = frozenset(row.name for row in batch.rows if not _has_temperature(row, temperature))
    included = [batch.with_token_weight(row) for row in batch.rows if row.name not in out]
    filling = [] if not included else [_idle(included[0])] * (size - len(included))
    tokens = sum(row.tokens for row in (*included, *filling))
    rows = [
        _trinity_row(row, row.token_weight * tokens, f"{digest[:40]}-{index}", step)
        for index, row in enumerate((*included, *filling))
    ]
    return rows, out


def is_finite(batch: Batch) -> bool:
    """Return whether every number of the batch is finite."""
    return all(math.isfinite(row.advantage) and bool(np.isfinite(row.behaviour_T).all()) for row in batch.rows)


def _has_temperature(row: Row, temperature: float) -> bool:
    """Return whether a row has logprobs and was sampled at `temperature` from the whole vocabulary."""
    if row.written or row.unsampled_T is not None or row.sets is not None:
        return False
    return bool((np.abs(row.temperature_T[row.loss_mask_T] - temperature) < 1e-6).all())


def _idle(row: Row) -> Row:
    """Return a copy of a row with one trained token and an advantage of 0, to fill a batch."""
    first = int(np.flatnonzero(row.loss_mask_T)[0])
    mask = np.zeros(first + 1, np.bool_)
    mask[first] = True
    part = slice(0, first + 1)
    return Row(
        "headrace-idle",
        0,
        row.token_ids_T[part],
        mask,
        row.behaviour_T[part],
        row.temperature_T[part],
        np.float32(0),
        mask,
    )


def _trinity_row(row: Row, scale: float, name: str, step: int) -> TrinityRow:
    task, advantage = row.experience_id, float(row.advantage) * scale
    if len(task) > _NAME_MAX:
        task = hashlib.sha256(task.encode()).hexdigest()
    prompt = int(np.flatnonzero(row.loss_mask_T)[0])
    mask = row.loss_mask_T[prompt:]
    each = np.float32(advantage) if row.advantage_T is None else row.advantage_T[prompt:] * np.float32(scale)
    advantages = np.where(mask, each, np.float32(0)).astype("<f4")
    tensors = {
        "tokens": row.token_ids_T.astype("<i4"),
        "logprobs": row.behaviour_T[prompt:].astype("<f4"),
        "advantages": advantages,
        "returns": advantages,
        "action_mask": mask.astype("?"),
    }
    about: dict[str, Any] = {
        "eid": {"batch": "headrace", "task": task, "run": 0, "step": 0, "suffix": name},
        "reward": advantage,
        "truncate_status": None,
        "info": {"model_version": step},
        "metrics": {},
        "prompt_length": prompt,
        "response_text": None,
        "prompt_text": None,
        "messages": None,
        "tools": None,
        "chosen_messages": None,
        "rejected_messages": None,
        "custom_fields": [],
        "multi_modal_input_keys": [],
    }
    return TrinityRow(task, name, step, advantage, _bytes(about, tensors))


def _bytes(about: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> bytes:
    meta = pickle.dumps({"version": _VERSION, "num_items": 1, "items": [about]}, protocol=5)
    blob = safetensors({f"0:{name}": tensor for name, tensor in tensors.items()})
    return _MAGIC + struct.pack("<BQQ", _VERSION, len(meta), len(blob)) + meta + blob


def safetensors(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode tensors in the safetensors format: the header's length, a JSON header, the numbers without gaps."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, tensor in _widest_first(tensors):
        data = tensor.tobytes()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def _widest_first(tensors: Mapping[str, NDArray[Any]]) -> Sequence[tuple[str, NDArray[Any]]]:
    """Sort arrays by item size, largest first, so that every array is aligned when they are stored one after the
    other.
    """
    return sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))


class Buffer:
    """Trinity's tables of experiences, `name` and `name`_blob, in the database `url`."""

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
        """Insert the rows of a batch in one transaction. Return False if they were inserted before.

        It raises `Unavailable`, blocks, and must not be called in an event loop.
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
