"""Finds the versions that the trainers' saved states need. The states are read as they were written and never changed.

A trainer continues from its base, the version that it trains, the promoted ones and those that it can go back to. If a
state cannot be read, or lacks all of these fields, the garbage collection is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import Records
from headrace_schemas.values.base import Version
from headrace_schemas.values.blobs import BlobRef

_FOLDER = "lineages"
_SHARED = 0


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Pointer(_Part):
    state: BlobRef | None
    epochs: dict[str, int] = {}


class _Published(_Part):
    version: Version


class _Announced(_Part):
    version: Version


class _State(_Part):
    versions: tuple[_Published, ...]
    head: Version
    promoted: tuple[Version, ...]
    restore_points: dict[Version, object]
    checkpoint: _Announced

    def needed(self) -> set[str]:
        return {
            *(version.version for version in self.versions[:1]),
            self.head,
            *self.promoted,
            *self.restore_points,
            self.checkpoint.version,
        }


def needed_versions(blobs: BlobStore) -> dict[str, set[str]]:
    """Return the versions that each lineage needs. Blocks. Raises `Refused` 409 for a lineage that cannot be read."""
    return {lineage: _needed(blobs, lineage) for lineage in _names(blobs)}


def _names(blobs: BlobStore) -> Iterator[str]:
    yield from sorted({*blobs.areas(_FOLDER), *blobs.pointers(_FOLDER)})


def _needed(blobs: BlobStore, lineage: str) -> set[str]:
    record = Records(blobs, f"{_FOLDER}/{lineage}").newest()
    data = record.data if record is not None else blobs.pointer(f"{_FOLDER}/{lineage}")
    if data is None:
        return set()
    try:
        pointer = _Pointer.model_validate_json(data)
        if pointer.state is None:
            return set()
        epoch = pointer.epochs.get(pointer.state.sha256, _SHARED)
        store = blobs if epoch == _SHARED else blobs.area(f"{_FOLDER}/{lineage}/{epoch:010d}")
        return _State.model_validate_json(store.get(pointer.state)).needed()
    except (ValidationError, CorruptBlob, MissingBlob) as error:
        problem = (
            f"{error.error_count()} fields are not as expected" if isinstance(error, ValidationError) else str(error)
        )
        message = f"lineage {lineage} cannot be read, so nothing is collected: {problem}; try again, or repair it"
        raise Refused(409, "lineage_unreadable", message) from None
