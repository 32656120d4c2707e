"""A batch as rows of Trinity's `Experience`, written without importing Trinity.

A row is a multi-turn sequence: the tokens from the first trained one on are the response, a mask marks the trained
ones, and logprobs and advantages have a number for each token of the response. The format is version 1 of Trinity's:
a magic word, two lengths, a pickle of plain values, and one safetensors blob.

Trinity's loss is a mean over the batch's tokens. The trainer's loss gives each token a weight, so advantages are scaled
to convert one into the other: the loss is linear in them. Rows that fill the batch up have an advantage of 0.
"""

from __future__ import annotations

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

from headrace_trainer.batches.batch import Batch, Row

_MAGIC, _VERSION = b"TRXP", 1
_NAME_MAX = 64
"""Length of a task's name in Trinity's tables, in characters."""
_TYPES = {np.dtype("<i4"): "I32", np.dtype("<f4"): "F32", np.dtype("?"): "BOOL"}


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
    """Return `size` rows for the step after `step`, and the names of the rows that were left out.

    Rows are left out if they were sampled at another temperature, or from a part of the vocabulary.
    """
    digest = batch.digest()
    out = frozenset(row.name for row in batch.rows if not _has_temperature(row, temperature))
    included = [batch.weighted(row) for row in batch.rows if row.name not in out]
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
    """Return whether the logprobs belong to a policy at this temperature; written tokens and some answers have none.

    Trinity computes logprobs over the whole vocabulary, so restricted answers have none either.
    """
    if row.written or row.unsampled_T is not None or row.sets is not None:
        return False
    return bool((np.abs(row.temperature_T[row.loss_mask_T] - temperature) < 1e-6).all())


def _idle(row: Row) -> Row:
    """Return a row with one trained token and an advantage of 0."""
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
    """Sort tensors by the size of their numbers, so that every number is aligned."""
    return sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
