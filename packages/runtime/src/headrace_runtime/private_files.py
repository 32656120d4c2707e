"""Creates files and folders that only their owner can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path

from headrace_runtime.errors import SettingError


def private_folder(path: Path) -> None:
    """Make it, its parents with the usual rights. One that is there and ours is closed to others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(found.st_mode & 0o700)


def data_folder(path: Path) -> None:
    """Make the folder `data_dir` as `private_folder` does.

    Raises:
        SettingError: no folder can be there, or this user cannot write in it.
    """
    try:
        private_folder(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError("data_dir", str(path), f"cannot be used: {reason}; name a folder that can be made") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingError("data_dir", str(path), "cannot be written by this user; name another folder")


def owner_alone(path: str, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags, 0o600)
