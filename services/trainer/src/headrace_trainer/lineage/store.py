"""Saves a lineage atomically, finds it again, and knows whose it is. All methods block.

Blobs first, each durable; then the pointer is replaced by compare-and-swap. A crash before that leaves the old state, a
crash after it the new one. Nothing is ever repaired by guessing: a damaged or missing blob ends the process with its
name.

A lineage has one owner at a time. Taking it over replaces the pointer, with the same state and the next epoch: from
then on no save of the former owner can succeed, however late it comes. Each owner writes its blobs in an area of its
own, so nothing that a former owner still writes or removes can touch what its successors need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from headrace_runtime import disk, holders
from headrace_runtime.blobs import BlobStore, digest_of
from headrace_runtime.errors import CorruptBlob, HeadraceError, SettingError, Unavailable
from headrace_runtime.records import Record, Records
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File
from headrace_trainer.learner import OPTIMIZER, WEIGHTS
from headrace_trainer.lineage.assembly import SharedWeights, assemble
from headrace_trainer.lineage.saved import Assembly, Pointer, Saved, ShortPointer, Tensors, read_saved
from headrace_trainer.settings import TrainerSettings

_M = TypeVar("_M", Pointer, ShortPointer, Saved)
_BEAT = "beat"
_RELEASED = b"released"
_READS_MAX = 20
_SHARED = 0
"""The epoch of blobs that lie among those of all: an earlier release wrote them there."""


class LineageTaken(HeadraceError):
    """Another process owns this lineage."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What a lineage's owner shows of itself. Two that are equal: it has given no sign of life in between."""

    number: int
    """Of the pointer; 0 when the lineage has never had an owner."""
    owner: str
    beat: bytes | None

    @property
    def free(self) -> bool:
        """Whether nobody owns it, or its owner has given it up."""
        return not self.owner or self.beat == _RELEASED


class LineageStore:
    """The saved state of one lineage. `take` makes it ours; `load`, `save`, `beat` and `release` are for its owner."""

    def __init__(self, blobs: BlobStore, lineage: str, owner: str | None = None) -> None:
        self.owner = owner or holders.me()
        self._blobs = blobs
        self._lineage = lineage
        self._records = Records(blobs, f"lineages/{lineage}")
        self._number = 0
        self._pointer: Pointer | None = None
        """The truth as far as we know it."""
        self._written: set[str] = set()
        """What we have put into our area."""
        self._beats = 0

    # Whose it is

    def sign(self) -> Sign:
        """What the present owner shows."""
        found = self._newest()
        if found is None:
            return Sign(0, "", None)
        number, pointer = found
        beat = self._area(pointer.epoch).pointer(_BEAT) if pointer.epoch else None
        return Sign(number, pointer.owner, beat)

    def take(self) -> bool:
        """Take the lineage over, whoever has it. False when it changed meanwhile: look again before another try."""
        found = self._newest()
        number, old = found or (0, None)
        epoch = old.epoch + 1 if old else 1
        state, epochs = (old.state, old.epochs) if old else (None, {})
        pointer = Pointer(epoch=epoch, owner=self.owner, state=state, epochs=epochs)
        if not self._records.append(number, pointer.model_dump_json().encode()):
            return False
        self._number, self._pointer, self._written = number + 1, pointer, set()
        return True

    def beat(self) -> None:
        """Give a sign of life. Raises `LineageTaken` when the lineage is not ours any more."""
        self._beats += 1
        self._area(self._epoch).set_pointer(_BEAT, str(self._beats).encode())
        self._check_ours()

    def release(self) -> None:
        """Let the next one begin at once. Nothing may be saved afterwards."""
        self._area(self._epoch).set_pointer(_BEAT, _RELEASED)

    # What it is

    def load(self) -> Saved | None:
        """The last durable state, to be continued; None when there has never been one. Removes what former owners have
        left behind. Raises `CorruptBlob` and `Unavailable`.
        """
        assert self._pointer is not None, "a lineage is taken before it is loaded"
        saved = self._state(self._pointer)
        self._sweep(self._pointer)
        return saved

    def read(self) -> Saved | None:
        """The same for one who only looks: changes nothing, and may be called while the lineage is being trained."""
        number = 0
        for _ in range(_READS_MAX):
            found = self._newest()
            if found is None:
                return None
            try:
                self._number, self._pointer = found
                return self._state(found[1])
            except (CorruptBlob, Unavailable):
                if found[0] == number:
                    raise
                number = found[0]  # it may have been replaced while we read it
        raise Unavailable(self._advise("is saved faster than it can be read"))

    def get(self, ref: BlobRef) -> bytes:
        """One blob of the state. Raises `CorruptBlob` when it is damaged, `Unavailable` when it is not there."""
        with self._advising():
            return self._area_of(ref).get(ref)

    def _area_of(self, ref: BlobRef) -> BlobStore:
        assert self._pointer is not None, "a lineage is read before its blobs"
        return self._area(self._pointer.epochs.get(ref.sha256, _SHARED))

    @contextlib.contextmanager
    def _advising(self) -> Iterator[None]:
        try:
            yield
        except (CorruptBlob, Unavailable) as error:
            if self._pointer is not None and self._pointer.owner == self.owner:
                self._check_ours()  # a new owner may have replaced it
            raise type(error)(self._advise(str(error))) from error

    @contextlib.contextmanager
    def unpacked(self, point: Tensors) -> Iterator[Path]:
        """A folder with the files of `point`, as a copy wrote them. Raises as `get` does."""
        with self.scratch() as folder:
            with self._advising():
                self._area_of(point.optimizer).get_file(point.optimizer, folder / OPTIMIZER)
                if point.assembly is None:
                    self._area_of(point.weights).get_file(point.weights, folder / WEIGHTS)
                else:
                    self._assemble(point.weights, point.assembly, folder / WEIGHTS)
            yield folder

    def _assemble(self, weights: BlobRef, assembly: Assembly, target: Path) -> None:
        with self.scratch() as folder:
            sources = [folder / str(number) for number in range(1 + len(assembly.files))]
            for ref, path in zip((assembly.frame, *assembly.files), sources, strict=True):
                self._area_of(ref).get_file(ref, path)
            assemble(sources, assembly.ranges, target)
        if digest_of(target) != (weights.sha256, weights.size):
            raise CorruptBlob(f"blob {assembly.frame.uri}: the weights that it frames do not hash to {weights.sha256}")

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for files of a save. What its disk refuses inside is raised as `save` does."""
        area = self._area(self._epoch)
        try:
            with area.scratch() as folder:
                yield folder
        except (OSError, Unavailable) as error:
            self._check_ours()  # a new owner may have removed it
            if isinstance(error, Unavailable):
                raise
            raise disk.no_room(area.url) if disk.is_full(error) else Unavailable(f"{area.url}: {error}") from error

    def packed(
        self,
        folder: Path,
        shared: SharedWeights | None = None,
        files: Sequence[File] = (),
        *,
        like: Tensors | None = None,
    ) -> Tensors:
        """Store the files that a copy wrote into `folder`, which are gone afterwards, for the next save. Raises as
        `save` does.

        Args:
            folder: A folder of `scratch`.
            shared: How the weights follow from `files` of a version, which are stored already.
            files: The files of that version.
            like: A point of the present state that has the very weights in `folder`.
        """

        def put(path: Path) -> BlobRef:
            return self._put(partial(BlobStore.put_file, path=path, move=True), self._area(self._epoch))

        optimizer = put(folder / OPTIMIZER)
        if like is not None:
            (folder / WEIGHTS).unlink()
            return like.model_copy(update={"optimizer": optimizer})
        if shared is None:
            return Tensors(weights=put(folder / WEIGHTS), optimizer=optimizer)
        sha256, size = digest_of(folder / WEIGHTS)
        frame = put(shared.frame)
        (folder / WEIGHTS).unlink()
        weights = BlobRef(uri=frame.uri, sha256=sha256, size=size)
        return Tensors(weights=weights, optimizer=optimizer, assembly=shared.assembly(files, frame))

    def save(self, saved: Saved) -> None:
        """Make `saved` the truth; its blobs are stored (`packed`).

        Raises `LineageTaken` when the lineage is not ours any more, `Unavailable` when the store is away: then it may
        have happened, and saving again is right.
        """
        old = self._pointer
        assert old is not None, "a lineage is taken before it is saved"
        area = self._area(old.epoch)
        ref = self._put(partial(BlobStore.put, data=saved.model_dump_json().encode()), area)
        used = {digest: old.epoch if digest in self._written else old.epochs[digest] for digest in saved.blobs()}
        pointer = Pointer(epoch=old.epoch, owner=self.owner, state=ref, epochs=used | {ref.sha256: old.epoch})
        self._swap(pointer)
        superfluous = {*old.epochs.items(), *((digest, old.epoch) for digest in self._written)}
        for digest, epoch in sorted(superfluous - set(pointer.epochs.items())):
            self._area(epoch).delete(_named(digest))
        self._written &= {digest for digest, epoch in pointer.epochs.items() if epoch == pointer.epoch}

    def _put(self, how: Callable[[BlobStore], BlobRef], area: BlobStore) -> BlobRef:
        try:
            ref = how(area)
            self._written.add(ref.sha256)
            return ref
        except Unavailable:
            self._check_ours()  # a new owner may be removing the area while we write to it
            raise

    def _swap(self, pointer: Pointer) -> None:
        data = pointer.model_dump_json().encode()
        while not self._records.append(self._number, data):
            self._number = self._check_ours()  # ours still: an earlier try got through, and its answer did not
        self._number, self._pointer = self._number + 1, pointer

    def _check_ours(self) -> int:
        """The pointer's number. Raises `LineageTaken` when it is not one of ours."""
        found = self._newest()
        if found is None or found[1].owner != self.owner:
            raise LineageTaken(self._lost(found[1].owner if found else ""))
        return found[0]

    def _state(self, pointer: Pointer) -> Saved | None:
        if pointer.state is None:
            return None
        saved = self._parsed(read_saved, self.get(pointer.state))
        # What an earlier release wrote is in no table.
        epochs = dict.fromkeys((*saved.blobs(), pointer.state.sha256), _SHARED) | pointer.epochs
        self._pointer = pointer.model_copy(update={"epochs": epochs})
        return saved

    def _newest(self) -> tuple[int, Pointer] | None:
        record = self._records.newest() or self._of_an_earlier_release()
        return None if record is None else (record.number, self._parsed(Pointer.model_validate_json, record.data))

    def _of_an_earlier_release(self) -> Record | None:
        """The pointer as a file that is replaced in place. It stays as it is; an owner's records come before it."""
        data = self._blobs.pointer(f"lineages/{self._lineage}")
        if data is None:
            return None
        pointer = Pointer(
            epoch=0, owner="", state=self._parsed(ShortPointer.model_validate_json, data).state, epochs={}
        )
        return Record(0, pointer.model_dump_json().encode())

    def _parsed(self, read: Callable[[bytes], _M], data: bytes) -> _M:
        try:
            return read(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise CorruptBlob(self._advise(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None

    def _sweep(self, pointer: Pointer) -> None:
        """Remove what former owners left. Those that still run can save no more, and write nowhere but there."""
        needed = set(pointer.epochs.items())
        for name in self._blobs.areas(self._areas):
            epoch = int(name)
            if epoch >= pointer.epoch:
                continue
            if epoch not in pointer.epochs.values():
                self._blobs.remove_area(f"{self._areas}/{name}")
                continue
            area = self._area(epoch)
            area.remove_scratch()
            for digest in list(area.digests()):
                if (digest, epoch) not in needed:
                    area.delete(_named(digest))

    @property
    def _areas(self) -> str:
        return f"lineages/{self._lineage}"

    @property
    def _epoch(self) -> int:
        assert self._pointer is not None, "a lineage is taken first"
        return self._pointer.epoch

    def _area(self, epoch: int) -> BlobStore:
        return self._blobs if epoch == _SHARED else self._blobs.area(f"{self._areas}/{epoch:010d}")

    def _lost(self, owner: str) -> str:
        who = holders.describe(owner) if owner else "somebody who removed its pointer"
        return (
            f"lineage {self._lineage} belongs to {who} now, and this process can save nothing any more; what it saved "
            "before is kept and goes on there. If two trainers were started, stop one of them or name another "
            "trainer.lineage for it"
        )

    def _advise(self, problem: str) -> str:
        remedy = "restore the blob store from a backup, or name another trainer.lineage"
        return f"lineages/{self._lineage}: {problem}; {remedy}"


def _named(digest: str) -> BlobRef:
    """Enough of a reference to delete by."""
    return BlobRef(uri="none", sha256=digest, size=0)


def replayed(settings: TrainerSettings, blobs: BlobStore) -> dict[str, int]:
    """The versions of the lineage that is trained again, by number. Raises `SettingError` when there is none."""
    if settings.replays is None:
        return {}
    other = LineageStore(blobs, settings.replays).read()
    if other is None:
        raise SettingError("trainer.replays", settings.replays, "no such lineage in this blob store")
    return {published.version: published.number for published in other.versions}
