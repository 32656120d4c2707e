"""Content-addressed storage behind an fsspec URL: a folder by default, S3-compatible past one machine (P7).

A blob's name is its SHA-256, so writing twice is harmless and a reader can check what it got.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from headrace_runtime.errors import CorruptBlob, MissingBlob, Unavailable
from headrace_runtime.settings import Common
from headrace_schemas.blobs import BlobRef


class BlobStore:
    """Put and get bytes by digest, and a few mutable pointers by name.

    Methods block; async callers use `aput` and `aget`.
    """

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._local = "file" in self._protocols(self._fs)
        self.url = url

    @classmethod
    def open(cls, common: Common) -> BlobStore:
        return cls(common.blobs.url or (common.data_dir.absolute() / "blobs").as_uri())

    def ref(self, data: bytes) -> BlobRef:
        """The reference that `put` would return, without storing anything."""
        digest = hashlib.sha256(data).hexdigest()
        return BlobRef(uri=self._fs.unstrip_protocol(self._path(digest)), sha256=digest, size=len(data))

    def put(self, data: bytes) -> BlobRef:
        """Store and return the reference. Atomic: a blob is whole or absent. Raises `Unavailable`."""
        ref = self.ref(data)
        path = self._path(ref.sha256)
        try:
            if not self._fs.exists(path):
                self._write(path, data)
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """Fetch and check. Raises `CorruptBlob` when they disagree with `ref`, `MissingBlob` when the store has none,
        `Unavailable` when it does not answer."""
        path = self._path(ref.sha256)
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError as error:
            if self._answers():
                raise MissingBlob(f"blob {ref.sha256} is not in {self.url}; restore it from a backup") from error
            raise Unavailable(f"blob store {self.url} is empty or not there: {error}") from error
        except OSError as error:
            raise Unavailable(f"blob {ref.sha256} in {self.url}: {error}") from error
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptBlob(f"blob {path}: {len(data)} bytes do not hash to {ref.sha256}; restore it from a backup")
        return data

    def delete(self, ref: BlobRef) -> None:
        """Remove the bytes; removing what is not there is fine. Raises `Unavailable`."""
        path = self._path(ref.sha256)
        try:
            if self._fs.exists(path):
                self._fs.rm_file(path)
        except OSError as error:
            raise Unavailable(f"blob store {self.url}: {error}") from error

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
            raise Unavailable(f"blob store {self.url}: {error}") from error

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

    def _path(self, digest: str) -> str:
        return f"{self._root}/sha256/{digest[:2]}/{digest}"

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(path, data)  # object stores replace whole objects
            return
        target = Path(path)
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
        for folder in (target.parent, *(folder.parent for folder in missing)):
            _sync_folder(folder)

    @staticmethod
    def _protocols(fs: Any) -> tuple[str, ...]:
        return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _sync_folder(folder: Path) -> None:
    """Make new names in `folder` survive a power cut; a pointer must not fall back to what has since been deleted."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
