"""Kinds of blob stores, by the protocol of their fsspec URL, which packages announce as entry points `headrace.blobs`.

fsspec opens a store, but does not define how the store creates a file only if it does not exist. Lineages that two
trainers may write require this operation. A store whose kind is not announced can contain blobs but no lineages.
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
"""Lock for stores in memory, which all threads of this process share."""


class NotExclusive(Exception):
    """Raised if a blob store may overwrite an existing file where it is told to create a new one. The message is the
    reason."""


@dataclass(frozen=True, slots=True)
class BlobBackend:
    """Properties of one kind of blob store that fsspec does not define."""

    create: Callable[[Any, str, bytes], bool]
    """Function `create(file_system, path, data)` that atomically creates a file unless it exists, and returns whether
    it created the file.

    If several callers create a file at the same time, exactly one gets True. The function raises `OSError` or
    `NotExclusive`.
    """
    folder: bool = False
    """Whether the store is a folder of this machine. Its files are synced to the disk before they get their names."""


BACKENDS: Registry[BlobBackend] = Registry("blobs", BlobBackend, "blob store")


def backend_of(file_system: Any) -> BlobBackend | None:
    """Return the announced kind of store for an fsspec file system, or None if none is announced for its protocol."""
    protocols = (file_system.protocol,) if isinstance(file_system.protocol, str) else file_system.protocol
    name = next((protocol for protocol in protocols if protocol in BACKENDS.names()), None)
    return None if name is None else BACKENDS.get(name)


def _create_by_link(_file_system: Any, path: str, data: bytes) -> bool:
    """Create the file as a hard link to a complete temporary file, which is atomic and never replaces a file."""
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
    """Create the file by a conditional request to the store, which refuses it if the file exists."""
    try:
        file_system.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except Exception:  # some client libraries do not recognise the server's refusal
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
    """Create or replace `target` as a hard link to the blob file `source`, and make the file read-only.

    Returns:
        Whether the link was created. False if the file system or its permissions do not allow hard links, or if
            `target` is on another disk; the caller must then copy the file.

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
    """Sync the entries of `folder` to the disk, so that new files still have their names after a power failure."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
