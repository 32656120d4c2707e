"""Small files: those that only their owner can read, independent of the umask, and atomic replacement."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from headrace_runtime.errors import SettingError


def private_folder(path: Path) -> None:
    """Create the folder for its owner alone, and its parents with the usual permissions.

    If the folder exists and belongs to this user, access of other users is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(status.st_mode & 0o700)


def data_folder(path: Path) -> None:
    """Create the folder `data_dir` as `private_folder` does.

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


def owner_alone(path: str, flags: int) -> int:
    """Open a file with permissions for its owner alone, as `opener` of `open`."""
    return os.open(path, flags, 0o600)


def replace_file(path: Path, data: bytes, *, opener: Callable[[str, int], int] | None = None) -> None:
    """Replace the content of `path` by `data` atomically. Only one process may write a path.

    A power failure may undo the replacement. If the write fails, the temporary file is removed.

    Args:
        path: the file.
        data: the new content.
        opener: as in `open`, for example `owner_alone`.

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
