"""Kinds of blob stores by the protocol of their fsspec URL: the entry points `headrace.blobs`.

fsspec opens the store, and packages can add file systems to fsspec. But fsspec does not define how a store creates a
file only if it does not exist, which lineages with two trainers require. A store without an announcement can hold blobs
but no lineages.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_runtime.registries import Registry

_NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
_WRITABLE = 0o222
_MEMORY_LOCK = threading.Lock()
"""Lock for stores in memory, which are shared within this process."""


class NotExclusive(Exception):
    """The store cannot create a file only if it does not exist. The message is the reason."""


@dataclass(frozen=True, slots=True)
class BlobBackend:
    """Properties of one kind of blob store that fsspec does not define."""

    create: Callable[[Any, str, bytes], bool]
    """`create(file_system, path, data)` atomically creates a file unless it exists, and returns whether it did.

    If several callers create a file at the same time, exactly one gets True. It raises `OSError` or `NotExclusive`."""
    folder: bool = False
    """Whether the store is a folder of this machine, in which files are made durable before they get their names."""


BACKENDS: Registry[BlobBackend] = Registry("blobs", BlobBackend, "blob store")


def backend_of(file_system: Any) -> BlobBackend | None:
    """Return the installed plug-in for a kind of object store, or None if its file system needs none."""
    protocols = (file_system.protocol,) if isinstance(file_system.protocol, str) else file_system.protocol
    name = next((protocol for protocol in protocols if protocol in BACKENDS.names()), None)
    return None if name is None else BACKENDS.get(name)


def _create_by_link(_file_system: Any, path: str, data: bytes) -> bool:
    """Create the file as a hard link to a complete draft, which is atomic and never replaces a file."""
    target = Path(path)
    draft, folders = write_draft(target, data)
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise NotExclusive("its file system has no hard links") from error
        raise
    finally:
        draft.unlink(missing_ok=True)
    for folder in folders:
        sync_folder(folder)
    return True


def _create_by_condition(file_system: Any, path: str, data: bytes) -> bool:
    """Create the file by a conditional request of the store."""
    try:
        file_system.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except Exception:  # not every client library recognises the refusal of its server
        if file_system.exists(path):
            return False
        raise
    return True


def _create_under_lock(file_system: Any, path: str, data: bytes) -> bool:
    with _MEMORY_LOCK:
        return _create_by_condition(file_system, path, data)


FOLDER = BlobBackend(_create_by_link, folder=True)
MEMORY = BlobBackend(_create_under_lock)
OBJECTS = BlobBackend(_create_by_condition)


def write_draft(target: Path, data: bytes) -> tuple[Path, list[Path]]:
    """Write `data` to a durable temporary file next to `target`.

    Returns:
        The temporary file, and the folders to sync after the caller has renamed it to `target`.
    """
    draft, folders = _draft_of(target)
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # on a full disk, an incomplete draft would take the space of a complete one
        raise
    return draft, folders


def copy_durably(target: Path, path: Path, *, move: bool) -> list[Path]:
    """Copy the file `path` to the durable file `target`. Return the folders that the caller must sync.

    Args:
        target: the new file.
        path: the file to copy.
        move: whether to remove `path`. On the same disk it is renamed instead of copied.
    """
    draft, folders = _draft_of(target)
    try:
        if move:
            shutil.move(path, draft)
        else:
            shutil.copyfile(path, draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return folders


def link_read_only(source: Path, target: Path) -> bool:
    """Create `target`, or replace it, as a hard link to the blob `source`, and make the file read-only.

    Returns:
        False if the file system, its rights or another disk do not allow this; then the caller must copy the file.

    Raises:
        FileNotFoundError: There is no such blob.
    """
    target.unlink(missing_ok=True)
    try:
        mode = source.stat().st_mode
        if mode & _WRITABLE:
            source.chmod(mode & ~_WRITABLE)
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _draft_of(target: Path) -> tuple[Path, list[Path]]:
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    return draft, [target.parent, *(folder.parent for folder in missing)]


def sync_folder(folder: Path) -> None:
    """Write the entries of `folder` to disk, so that new files still have their names after a power failure."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
