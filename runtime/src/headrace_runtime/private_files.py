"""Creates files and folders that only their owner can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path) -> None:
    """Make it, its parents with the usual rights. One that is there and ours is closed to others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(found.st_mode & 0o700)


def owner_alone(path: str, flags: int) -> int:
    """An `opener` for `open`."""
    return os.open(path, flags, 0o600)
