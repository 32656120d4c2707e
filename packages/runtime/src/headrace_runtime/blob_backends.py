"""Kinds of blob stores, by the protocol of their fsspec URL: the entry points `headrace.blobs`.

fsspec opens the store, and packages add file systems to it by entry points of its own. What it does not say is how a
store writes a name only if nobody has, of which two trainers on one lineage depend. Without an announcement a store
keeps blobs all the same, and no lineage.
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
_MEMORY = threading.Lock()
"""Whoever shares a store in memory shares this process."""


class NotExclusive(Exception):
    """The store cannot write a name only if nobody has; the message says why."""


@dataclass(frozen=True, slots=True)
class BlobBackend:
    """One kind. `create(file_system, path, data)` writes the file unless it is there, whole or not at all, and says
    whether: of all who try at once one alone is told True. It raises `OSError` or `NotExclusive`."""

    create: Callable[[Any, str, bytes], bool]
    folder: bool = False
    """It is a folder of this machine, in which files are made durable before they get their names."""


BACKENDS: Registry[BlobBackend] = Registry("blobs", BlobBackend, "blob store")


def backend_of(file_system: Any) -> BlobBackend | None:
    """Whoever is announced for one of its protocols."""
    protocols = (file_system.protocol,) if isinstance(file_system.protocol, str) else file_system.protocol
    known = [protocol for protocol in protocols if protocol in BACKENDS.names()]
    return BACKENDS.get(known[0]) if known else None


def _linked(_file_system: Any, path: str, data: bytes) -> bool:
    """A second name for a file that is whole already: it appears at once or not at all, and never replaces."""
    target = Path(path)
    draft, folders = drafted(target, data)
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


def _conditional(file_system: Any, path: str, data: bytes) -> bool:
    """The store's own conditional request."""
    try:
        file_system.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except Exception:  # not every server's refusal is understood by its client library
        if file_system.exists(path):
            return False
        raise
    return True


def _locked(file_system: Any, path: str, data: bytes) -> bool:
    with _MEMORY:
        return _conditional(file_system, path, data)


FOLDER = BlobBackend(_linked, folder=True)
MEMORY = BlobBackend(_locked)
OBJECTS = BlobBackend(_conditional)


def drafted(target: Path, data: bytes) -> tuple[Path, list[Path]]:
    """A durable file beside `target`, and the folders that are to be synced once it has its name."""
    draft, folders = _draft_of(target)
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)  # on a full disk, half a blob would take the room of a whole one
        raise
    return draft, folders


def moved_in(target: Path, path: Path, *, move: bool) -> list[Path]:
    """Make `path`, or without `move` a copy of it, the durable file `target`. Returns the folders that are to be
    synced."""
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


def _draft_of(target: Path) -> tuple[Path, list[Path]]:
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    return draft, [target.parent, *(folder.parent for folder in missing)]


def sync_folder(folder: Path) -> None:
    """Make new names in `folder` survive a power cut; a pointer must not fall back to what has since been deleted."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
