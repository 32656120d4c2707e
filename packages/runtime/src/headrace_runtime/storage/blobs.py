"""Content-addressed storage (blob store) at an fsspec URL: a folder by default, or an object store if services run on
several machines.

The name of a blob is the SHA-256 of its content. So writing it twice is harmless, and readers can check its content.
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

from headrace_runtime.blob_backends import (
    BlobBackend,
    NotExclusive,
    backend_of,
    copy_durably,
    link_read_only,
    sync_folder,
    write_draft,
)
from headrace_runtime.errors import CorruptBlob, MissingBlob, SettingError, Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import disk
from headrace_schemas.values.blobs import BlobRef

_SCRATCH = "scratch"
_PIECE_BYTES = 4 << 20


class BlobStore:
    """Store of blobs, which are files named by their digest, and of small files with a name: pointers, whose content
    can be replaced, and records, whose content cannot.

    Methods block. Asynchronous callers use `aput` and `aget`.
    """

    def __init__(self, url: str) -> None:
        """Open the store at `url`. The URL may name a folder that does not exist yet.

        Percent escapes of a `file://` URL are decoded. References have fsspec's form, which has no escapes.
        """
        decoded_url = unquote(url) if url.startswith("file:") else url
        # A cached listing would miss changes of other processes.
        self._fs, self._root = fsspec.core.url_to_fs(decoded_url, use_listings_cache=False)
        self._backend = backend_of(self._fs)
        self._local = self._backend is not None and self._backend.folder
        self.url = url

    @classmethod
    def open(cls, common: Common) -> BlobStore:
        """Open the store that the settings name, by default the folder `blobs` in `data_dir`."""
        return cls(common.blobs.url or (common.data_dir.absolute() / "blobs").as_uri())

    def ref(self, data: bytes) -> BlobRef:
        """Return the reference that `put` would return for `data`, without storing it."""
        return self._ref(hashlib.sha256(data).hexdigest(), len(data))

    def file_ref(self, path: Path) -> BlobRef:
        """Return the reference that `put_file` would return, with at most a piece of the file in memory."""
        return self._ref(*digest_of(path))

    def put(self, data: bytes) -> BlobRef:
        """Store `data` as a blob atomically, and return its reference. Raises `Unavailable`."""
        ref = self.ref(data)
        path = self._path(ref.sha256)
        try:
            if not self._fs.exists(path):
                self._write(path, data)
        except OSError as error:
            raise self._write_error(error) from error
        return ref

    def put_file(self, path: Path, *, move: bool = False) -> BlobRef:
        """Store a file as a blob, and return its reference. At most a piece of the file is in memory at a time.

        Args:
            path: the file.
            move: whether to remove the file. In a folder of `scratch` it is renamed instead of copied.

        Raises:
            Unavailable: the store cannot be written.
        """
        try:
            ref = self.file_ref(path)
            target = self._path(ref.sha256)
            if not self._fs.exists(target):
                self._write_file(target, path, move=move)
        except OSError as error:
            raise self._write_error(error) from error
        if move:
            path.unlink(missing_ok=True)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """Read the content of a blob, of a larger one at most `ref.size` + 1 bytes, and check it against its digest.

        Raises:
            CorruptBlob: the content does not match `ref`.
            MissingBlob: the store is reachable but lacks the blob.
            Unavailable: the store does not respond.
        """
        path = self._path(ref.sha256)
        with self._translate_errors(ref):
            if not ref.size and (size := self._fs.info(path)["size"]):
                raise self._corrupt(ref, size)
            # Object stores refuse a range of an empty blob.
            data: bytes = self._fs.cat_file(path, end=ref.size + 1) if ref.size else self._fs.cat_file(path)
        if not ref.matches(data):
            raise self._corrupt(ref, len(data))
        return data

    def get_file(self, ref: BlobRef, path: Path) -> None:
        """Copy a blob to the file `path` and check it against its digest. At most a piece of it is in memory at a time.

        If the store is a folder on the same disk, `path` becomes a read-only hard link to the blob: it takes no space,
        and the caller must not change it. Raises as `get` does, and then leaves no file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._translate_errors(ref, path.parent):
                if not (self._local and link_read_only(Path(self._path(ref.sha256)), path)):
                    self._fs.get_file(self._path(ref.sha256), str(path))
            digest, size = digest_of(path)
            if (digest, size) != (ref.sha256, ref.size):
                raise self._corrupt(ref, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def shares_disk_with(self, folder: Path) -> bool:
        """Return whether `get_file` takes no space in `folder`, because it links blobs there instead of copying
        them."""
        return self._local and Path(self._root).exists() and Path(self._root).stat().st_dev == folder.stat().st_dev

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary folder for files that will be stored with `put_file`. If the store is a folder, it is on
        the same disk.

        `remove_scratch` removes such folders of killed processes.
        """
        if not self._local:
            with tempfile.TemporaryDirectory(prefix="headrace-blobs-") as name:
                yield Path(name)
            return
        folder = Path(self._root) / _SCRATCH / uuid.uuid4().hex
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._write_error(error) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def space_problem(self, next_bytes: int, free_bytes_min: int | None) -> str | None:
        """Return a message if the disk has too little space for `next_bytes` (see `disk.problem`), else None. Blocks.

        For a store that is not a folder, the result is always None.
        """
        if not self._local:
            return None
        Path(self._root).mkdir(parents=True, exist_ok=True)
        return disk.problem(Path(self._root), free_bytes_min, next_bytes=next_bytes)

    def remove_scratch(self) -> None:
        """Remove the folders that `scratch` created in all processes. Call it only while no process uses such a
        folder."""
        if self._local:
            shutil.rmtree(Path(self._root) / _SCRATCH, ignore_errors=True)

    def holds(self, ref: BlobRef) -> bool:
        """Return whether the store has a blob of this digest and size, without reading its content. Raises
        `Unavailable`."""
        try:
            return bool(self._fs.info(self._path(ref.sha256))["size"] == ref.size)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def delete(self, ref: BlobRef) -> None:
        """Remove a blob if it exists. Raises `Unavailable`."""
        self._remove(self._path(ref.sha256))

    def digests(self) -> Iterator[str]:
        """Yield the digests of all blobs in the store."""
        for path in self._fs.find(f"{self._root}/sha256"):
            name = PurePosixPath(path).name
            if len(name) == 64:
                yield name

    def set_pointer(self, name: str, data: bytes) -> None:
        """Atomically replace the content of the small file `pointers/NAME`. Raises `Unavailable`."""
        try:
            self._write(f"{self._root}/pointers/{name}", data)
        except OSError as error:
            raise self._write_error(error) from error

    def pointer(self, name: str) -> bytes | None:
        """Return the content of `pointers/NAME`, or None if the file does not exist. Raises `Unavailable`."""
        path = f"{self._root}/pointers/{name}"
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error
        return data

    def create(self, name: str, data: bytes) -> bool:
        """Create `pointers/NAME` unless it exists, and return whether it was created.

        If several callers create it at the same time, exactly one gets True.

        Raises:
            SettingError: the store cannot create a file only if it does not exist.
            Unavailable: the store does not respond. The file may have been created nevertheless.
        """
        self._exclusive()
        try:
            return self._create(f"{self._root}/pointers/{name}", data)
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def check_exclusive(self) -> None:
        """Check that `create` never replaces a file in this store. Raises `SettingError` if it does, or
        `Unavailable`."""
        name = f"probe/{uuid.uuid4().hex}"
        self.create(name, b"1")
        is_created_again = self.create(name, b"2")
        is_unchanged = self.pointer(name) == b"1"
        self.remove_pointer(name)
        if is_created_again or not is_unchanged:
            raise self._not_exclusive("replaced a file that must only be created if it does not exist")

    def pointers(self, folder: str) -> list[str]:
        """Return the sorted names of the files directly in `pointers/FOLDER/`. Raises `Unavailable`."""
        return [name for name, kind in self._names(f"{self._root}/pointers/{folder}") if kind == "file"]

    def remove_pointer(self, name: str) -> None:
        """Remove `pointers/NAME` if it exists. Raises `Unavailable`."""
        self._remove(f"{self._root}/pointers/{name}")

    def area(self, name: str) -> BlobStore:
        """Return a separate store in the subfolder `areas/NAME` of this one. `remove_area` removes its content."""
        inner = copy.copy(self)
        inner._root = f"{self._root}/areas/{name}"
        return inner

    def areas(self, folder: str) -> list[str]:
        """Return the sorted names of the separate stores in `areas/FOLDER/` (one for each owner of a lineage). Raises
        `Unavailable`."""
        return [name for name, kind in self._names(f"{self._root}/areas/{folder}") if kind == "directory"]

    def remove_area(self, name: str) -> None:
        """Remove the content of the separate store NAME. Files that are added at the same time may remain. Raises
        `Unavailable`."""
        try:
            self._fs.rm(f"{self._root}/areas/{name}", recursive=True)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def _has_content(self) -> bool:
        """Return whether the store contains any file. If not, its folder may not be mounted, or its bucket may be
        missing."""
        try:
            return bool(self._fs.exists(self._root)) and bool(self._fs.ls(self._root, detail=False))
        except OSError:
            return False

    async def aput(self, data: bytes) -> BlobRef:
        return await asyncio.to_thread(self.put, data)

    async def aget(self, ref: BlobRef) -> bytes:
        return await asyncio.to_thread(self.get, ref)

    @contextlib.contextmanager
    def _translate_errors(self, ref: BlobRef, folder: Path | None = None) -> Iterator[None]:
        """Convert exceptions of reading a blob to `MissingBlob`, `DiskFull` or `Unavailable`. `folder` is the folder to
        which the blob is copied, or None."""
        try:
            yield
        except FileNotFoundError as error:
            if self._has_content():
                raise MissingBlob(f"blob {ref.sha256} is not in {self.url}; restore it from a backup") from error
            raise Unavailable(f"blob store {self.url} is empty or missing: {error}") from error
        except OSError as error:
            if folder is not None and disk.is_full(error):
                raise disk.full_error(folder) from error
            raise Unavailable(f"blob {ref.sha256} in {self.url}: {error}") from error

    def _ref(self, digest: str, size: int) -> BlobRef:
        return BlobRef(uri=self._fs.unstrip_protocol(self._path(digest)), sha256=digest, size=size)

    def _corrupt(self, ref: BlobRef, size: int) -> CorruptBlob:
        path = self._path(ref.sha256)
        return CorruptBlob(f"blob {path}: {size} bytes do not hash to {ref.sha256}; restore it from a backup")

    def _write_error(self, error: OSError) -> Unavailable:
        return disk.full_error(self._root) if disk.is_full(error) else Unavailable(f"blob store {self.url}: {error}")

    def _path(self, digest: str) -> str:
        return f"{self._root}/sha256/{digest[:2]}/{digest}"

    def _remove(self, path: str) -> None:
        try:
            if self._fs.exists(path):
                self._fs.rm_file(path)
        except FileNotFoundError:
            return  # another process has removed it
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

    def _names(self, folder: str) -> list[tuple[str, str]]:
        """Return name and kind of the entries of a folder, without temporary files; an empty list if the folder does
        not exist."""
        try:
            entries = _list_folder(folder) if self._local else self._fs.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error
        names = ((PurePosixPath(entry["name"]).name, entry["type"]) for entry in entries)
        return sorted((name, kind) for name, kind in names if not name.startswith("."))

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(path, data)  # object stores replace whole objects
            return
        target = Path(path)
        draft, folders = write_draft(target, data)
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
        for folder in copy_durably(Path(target), path, move=move):
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
            f"{problem}, which two trainers on one lineage require; use a folder, s3://, gs:// or abfs://",
        )


def digest_of(path: Path) -> tuple[str, int]:
    """Return the SHA-256 and the size of a file. Reading each piece of it reports progress to `liveness`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            liveness.progress()
        return digest.hexdigest(), file.tell()


def _list_folder(folder: str) -> list[dict[str, str]]:
    """List a folder in fsspec's format. fsspec's own function fails if a file is removed at the same time, for example
    a temporary file."""
    with os.scandir(folder) as entries:
        return [{"name": entry.name, "type": "directory" if entry.is_dir() else "file"} for entry in entries]
