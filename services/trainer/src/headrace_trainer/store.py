"""Saves a lineage atomically and finds it again. All methods block.

Blobs first, each under its digest and durable; then one pointer is replaced. A crash before that leaves the old state,
a crash after it the new one, and in either case the next start removes what the other one needed. Nothing is ever
repaired by guessing: a damaged or missing blob ends the process with its name.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import CorruptBlob, HeadraceError, SettingError, Unavailable
from headrace_schemas.blobs import BlobRef
from headrace_trainer.saved import Draft, Pointer, Saved
from headrace_trainer.settings import TrainerSettings


class LineageTaken(HeadraceError):
    """Another process saved this lineage since we did."""


class LineageStore:
    """The saved state of one lineage under `pointers/lineages/<name>`."""

    def __init__(self, blobs: BlobStore, lineage: str) -> None:
        self._blobs = blobs
        self._pointer = f"lineages/{lineage}"
        self._draft = f"lineages/{lineage}.draft"
        self._truth: bytes | None = None
        self._used: dict[str, BlobRef] = {}

    def load(self) -> Saved | None:
        """The last durable state, to be continued; None when there has never been one. Removes what a save that a crash
        cut short has left behind. Raises `CorruptBlob` and `Unavailable`.
        """
        saved = self.read()
        if saved is not None:
            self._sweep()
        return saved

    def read(self) -> Saved | None:
        """The same for one who only looks: changes nothing, and may be called while the lineage is being trained."""
        self._truth = self._blobs.pointer(self._pointer)
        if self._truth is None:
            return None
        try:
            pointer = Pointer.model_validate_json(self._truth)
            saved = Saved.model_validate_json(self.get(pointer.state))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise CorruptBlob(self._advise(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None
        self._used = saved.blobs() | {pointer.state.sha256: pointer.state}
        return saved

    def get(self, ref: BlobRef) -> bytes:
        """One blob of the state. Raises `CorruptBlob` when it is damaged, `Unavailable` when it is not there."""
        try:
            return self._blobs.get(ref)
        except (CorruptBlob, Unavailable) as error:
            raise type(error)(self._advise(str(error))) from error

    def save(self, saved: Saved, new: Iterable[bytes]) -> None:
        """Make `saved` the truth. `new` holds the bytes of those of its blobs that are not stored yet.

        Raises `LineageTaken` when somebody else saved this lineage, `Unavailable` when the store is away.
        """
        state = saved.model_dump_json().encode()
        ref = self._blobs.ref(state)
        used = saved.blobs() | {ref.sha256: ref}
        self._announce([*used.values(), *self._used.values()])
        for data in (*new, state):
            self._blobs.put(data)
        if self._blobs.pointer(self._pointer) != self._truth:
            raise LineageTaken(self._advise("another process trains it"))
        truth = Pointer(state=ref).model_dump_json().encode()
        self._blobs.set_pointer(self._pointer, truth)
        superfluous = [old for digest, old in self._used.items() if digest not in used]
        self._truth, self._used = truth, used
        for old in superfluous:
            self._blobs.delete(old)

    def _announce(self, refs: Iterable[BlobRef]) -> None:
        self._blobs.set_pointer(self._draft, Draft(blobs=tuple(refs)).model_dump_json().encode())

    def _sweep(self) -> None:
        draft = self._blobs.pointer(self._draft)
        for ref in Draft.model_validate_json(draft).blobs if draft else ():
            if ref.sha256 not in self._used:
                self._blobs.delete(ref)

    def _advise(self, problem: str) -> str:
        return f"{self._pointer}: {problem}; restore the blob store from a backup, or name another trainer.lineage"


def replayed(settings: TrainerSettings, blobs: BlobStore) -> dict[str, int]:
    """The versions of the lineage that is trained again, by number. Raises `SettingError` when there is none."""
    if settings.replays is None:
        return {}
    other = LineageStore(blobs, settings.replays).read()
    if other is None:
        raise SettingError("trainer.replays", settings.replays, "no such lineage in this blob store")
    return {published.version: published.number for published in other.versions}
