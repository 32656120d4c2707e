"""Helpers for small files: files that only their owner can read, atomic replacement, and lists of names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from headrace_runtime.errors import SettingError

_NAMES_MAX = 10_000


def private_folder(path: Path) -> None:
    """Create a folder that only its owner can read, whatever the umask. Its parents get the usual permissions.

    If the folder exists and belongs to this user, access of other users is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(status.st_mode & 0o700)


def data_folder(path: Path) -> None:
    """Create the folder `data_dir` so that only its owner can read it.

    Raises:
        SettingError: the folder cannot be created, or this user cannot write to it.
    """
    try:
        private_folder(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError(
            "data_dir", str(path), f"cannot be used: {reason}; name a folder that can be created"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingError("data_dir", str(path), "cannot be written by this user; name another folder")


def open_for_owner(path: str, flags: int) -> int:
    """Open a file so that only its owner can read it. The function is meant as the `opener` of `open`."""
    return os.open(path, flags, 0o600)


def replace_file(path: Path, data: bytes, *, opener: Callable[[str, int], int] | None = None) -> None:
    """Replace the content of `path` by `data` atomically. Only one process at a time may write a path.

    A power failure may undo the replacement. If the write fails, the temporary file is removed.

    Args:
        path: the file.
        data: the new content.
        opener: as in `open`, for example `open_for_owner`.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", opener=opener) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class NameFile:
    """File with the last 10,000 names of one kind, for example the ids of the dead letters that a service has sent.

    A service that reads a topic again at each start recognizes by it the records that it has already handled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="ascii", errors="replace").split() if path.exists() else []
        self._names = dict.fromkeys(lines[-_NAMES_MAX:])
        if len(lines) > _NAMES_MAX:
            replace_file(path, "".join(f"{name}\n" for name in self._names).encode("ascii"))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Append a name to the file. The file is not synced to the disk, so a power failure may lose the name."""
        self._names[name] = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{name}\n")
