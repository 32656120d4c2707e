"""Content-addressed storage behind an fsspec URL: a folder by default, S3-compatible past one machine (P7).

A blob's name is its SHA-256, so writing twice is harmless and a reader can check what it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import fsspec

from headrace_runtime import disk, liveness
from headrace_runtime.blob_backends import BlobBackend, NotExclusive, backend_of, drafted, moved_in, sync_folder
from headrace_runtime.errors import CorruptBlob, MissingBlob, SettingError, Unavailable
from headrace_runtime.settings import Common
from headrace_schemas.blobs import BlobRef

_SCRATCH = "scratch"
_PIECE_BYTES = 4 << 20


class BlobStore:
    """Put and get bytes by digest, and a few small files by name: pointers, which are replaced, and records, which are
    not.

    Methods block; async callers use `aput` and `aget`.
    """

    def __init__(self, url: str) -> None:
        """A `file://` URL is a URL: `%20` in it is a blank. References have fsspec's form, which escapes nothing."""
        place = unquote(url) if url.startswith("file:") else url
        # A remembered listing would hide what another process has written, or show what it has removed.
        self._fs, self._root = fsspec.core.url_to_fs(place, use_listings_cache=False)
        self._backend = backend_of(self._fs)
        self._local = self._backend is not None and self._backend.folder
        self.url = url

    @classmethod
    def open(cls, common: Common) -> BlobStore:
        return cls(common.blobs.url or (common.data_dir.absolute() / "blobs").as_uri())

    def ref(self, data: bytes) -> BlobRef:
        """The reference that `put` would return, without storing anything."""
        return self._ref(hashlib.sha256(data).hexdigest(), len(data))

    def put(self, data: bytes) -> BlobRef:
        """Store and return the reference. Atomic: a blob is whole or absent. Raises `Unavailable`."""
        ref = self.ref(data)
        path = self._path(ref.sha256)
        try:
            if not self._fs.exists(path):
                self._write(path, data)
        except OSError as error:
            raise self._refused(error) from error
        return ref

    def put_file(self, path: Path, *, move: bool = False) -> BlobRef:
        """The same of a file, of which no more than a piece is in memory. `move`: the file is gone afterwards, and
        where the store is a folder of the same disk (`scratch`), nothing is copied."""
        try:
            ref = self._ref(*digest_of(path))
            target = self._path(ref.sha256)
            if not self._fs.exists(target):
                self._write_file(target, path, move=move)
        except OSError as error:
            raise self._refused(error) from error
        if move:
            path.unlink(missing_ok=True)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """Fetch and check. Raises `CorruptBlob` when they disagree with `ref`, `MissingBlob` when the store has none,
        `Unavailable` when it does not answer."""
        path = self._path(ref.sha256)
        with self._fetching(ref):
            data: bytes = self._fs.cat_file(path)
        if not ref.matches(data):
            raise self._corrupt(ref, len(data))
        return data

    def get_file(self, ref: BlobRef, path: Path) -> None:
        """The same into a file, of which no more than a piece is in memory. It is not there when this raises."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._fetching(ref, path.parent):
                self._fs.get_file(self._path(ref.sha256), str(path))
            found, size = digest_of(path)
            if (found, size) != (ref.sha256, ref.size):
                raise self._corrupt(ref, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder on this machine for files that become blobs (`put_file`): on the store's own disk, where it is a
        folder. It is gone afterwards; what a killed process leaves there, `remove_scratch` removes."""
        if not self._local:
            with tempfile.TemporaryDirectory(prefix="headrace-blobs-") as name:
                yield Path(name)
            return
        folder = Path(self._root) / _SCRATCH / uuid.uuid4().hex
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._refused(error) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def room_trouble(self, next_bytes: int, free_bytes_min: int | None) -> str | None:
        """Return why `next_bytes` should not be stored now (`disk.trouble`), None when they can be. Blocks. A store
        that is no folder has no disk of ours."""
        if not self._local:
            return None
        Path(self._root).mkdir(parents=True, exist_ok=True)
        return disk.trouble(Path(self._root), free_bytes_min, next_bytes=next_bytes)

    def remove_scratch(self) -> None:
        """Of processes that have ended: nobody may be writing there."""
        if self._local:
            shutil.rmtree(Path(self._root) / _SCRATCH, ignore_errors=True)

    def holds(self, ref: BlobRef) -> bool:
        """Whether the store has bytes of this name and size; they are not read. Raises `Unavailable`."""
        try:
            return bool(self._fs.info(self._path(ref.sha256))["size"] == ref.size)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def delete(self, ref: BlobRef) -> None:
        """Remove the bytes; removing what is not there is fine. Raises `Unavailable`."""
        self._remove(self._path(ref.sha256))

    def digests(self) -> Iterator[str]:
        """Every blob's digest."""
        for path in self._fs.find(f"{self._root}/sha256"):
            name = PurePosixPath(path).name
            if len(name) == 64:
                yield name

    def set_pointer(self, name: str, data: bytes) -> None:
        """Atomically replace the small mutable file `pointers/<name>`. Raises `Unavailable`."""
        try:
            self._write(f"{self._root}/pointers/{name}", data)
        except OSError as error:
            raise self._refused(error) from error

    def pointer(self, name: str) -> bytes | None:
        """What `set_pointer` last wrote, None when it never did. Raises `Unavailable`."""
        path = f"{self._root}/pointers/{name}"
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error
        return data

    def create(self, name: str, data: bytes) -> bool:
        """Write `pointers/<name>` unless it is there, and say whether. Of all who try at once one alone is told True.

        Raises `SettingError` where the store cannot do that, `Unavailable` when it is away: then it may have happened.
        """
        self._exclusive()
        try:
            return self._create(f"{self._root}/pointers/{name}", data)
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def check_exclusive(self) -> None:
        """Try `create`. Raises `SettingError` when the store takes a second writer for the first, or `Unavailable`."""
        name = f"probe/{uuid.uuid4().hex}"
        self.create(name, b"1")
        again, kept = self.create(name, b"2"), self.pointer(name) == b"1"
        self.remove_pointer(name)
        if again or not kept:
            raise self._not_exclusive("overwrote a file that was to be written only if it did not exist")

    def pointers(self, folder: str) -> list[str]:
        """Names of the small files directly in `pointers/<folder>/`, sorted. Raises `Unavailable`."""
        return [name for name, kind in self._names(f"{self._root}/pointers/{folder}") if kind == "file"]

    def remove_pointer(self, name: str) -> None:
        """Remove a small file; one that is not there is fine. Raises `Unavailable`."""
        self._remove(f"{self._root}/pointers/{name}")

    def area(self, name: str) -> BlobStore:
        """A store of its own below this one: what it holds is not seen from here and removed with `remove_area`."""
        inner = copy.copy(self)
        inner._root = f"{self._root}/areas/{name}"
        return inner

    def areas(self, folder: str) -> list[str]:
        """Names of the areas directly below `folder`, sorted. Raises `Unavailable`."""
        return [name for name, kind in self._names(f"{self._root}/areas/{folder}") if kind == "directory"]

    def remove_area(self, name: str) -> None:
        """Remove what an area holds; what somebody adds meanwhile may stay. Raises `Unavailable`."""
        try:
            self._fs.rm(f"{self._root}/areas/{name}", recursive=True)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def _answers(self) -> bool:
        """Whether the store holds anything: a folder that is not mounted, or a bucket that is not there, does not."""
        try:
            return bool(self._fs.exists(self._root)) and bool(self._fs.ls(self._root, detail=False))
        except OSError:
            return False

    async def aput(self, data: bytes) -> BlobRef:
        return await asyncio.to_thread(self.put, data)

    async def aget(self, ref: BlobRef) -> bytes:
        return await asyncio.to_thread(self.get, ref)

    @contextlib.contextmanager
    def _fetching(self, ref: BlobRef, place: Path | None = None) -> Iterator[None]:
        """`place`: where it goes on this machine's disk."""
        try:
            yield
        except FileNotFoundError as error:
            if self._answers():
                raise MissingBlob(f"blob {ref.sha256} is not in {self.url}; restore it from a backup") from error
            raise Unavailable(f"blob store {self.url} is empty or not there: {error}") from error
        except OSError as error:
            if place is not None and disk.is_full(error):
                raise disk.no_room(place) from error
            raise Unavailable(f"blob {ref.sha256} in {self.url}: {error}") from error

    def _ref(self, digest: str, size: int) -> BlobRef:
        return BlobRef(uri=self._fs.unstrip_protocol(self._path(digest)), sha256=digest, size=size)

    def _corrupt(self, ref: BlobRef, size: int) -> CorruptBlob:
        path = self._path(ref.sha256)
        return CorruptBlob(f"blob {path}: {size} bytes do not hash to {ref.sha256}; restore it from a backup")

    def _refused(self, error: OSError) -> Unavailable:
        return disk.no_room(self._root) if disk.is_full(error) else Unavailable(f"blob store {self.url}: {error}")

    def _path(self, digest: str) -> str:
        return f"{self._root}/sha256/{digest[:2]}/{digest}"

    def _remove(self, path: str) -> None:
        try:
            if self._fs.exists(path):
                self._fs.rm_file(path)
        except FileNotFoundError:
            return  # somebody else was faster
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def _names(self, folder: str) -> list[tuple[str, str]]:
        """Name and kind of everything directly in a folder, none when it does not exist. No drafts."""
        try:
            found = _listed(folder) if self._local else self._fs.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error
        names = ((PurePosixPath(entry["name"]).name, entry["type"]) for entry in found)
        return sorted((name, kind) for name, kind in names if not name.startswith("."))

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(path, data)  # object stores replace whole objects
            return
        target = Path(path)
        draft, folders = drafted(target, data)
        try:
            draft.replace(target)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        for folder in folders:
            sync_folder(folder)

    def _write_file(self, target: str, path: Path, *, move: bool) -> None:
        if not self._local:
            self._fs.put_file(str(path), target)
            return
        for folder in moved_in(Path(target), path, move=move):
            sync_folder(folder)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            return self._exclusive().create(self._fs, path, data)
        except NotExclusive as error:
            raise self._not_exclusive(str(error)) from error

    def _exclusive(self) -> BlobBackend:
        if self._backend is None:
            raise self._not_exclusive("cannot write a file only if it does not exist")
        return self._backend

    def _not_exclusive(self, problem: str) -> SettingError:
        return SettingError(
            "blobs.url",
            self.url,
            f"{problem}, so two trainers could not be told apart there; use a folder, s3://, gs:// or abfs://",
        )


def digest_of(path: Path) -> tuple[str, int]:
    """SHA-256 and size of a file, read in pieces, each a sign of life (`liveness.progress`)."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            liveness.progress()
        return digest.hexdigest(), file.tell()


def _listed(folder: str) -> list[dict[str, str]]:
    """As fsspec lists, which gives up when one of the files goes away meanwhile: a draft that got its name, say."""
    with os.scandir(folder) as entries:
        return [{"name": entry.name, "type": "directory" if entry.is_dir() else "file"} for entry in entries]
