"""A full disk: simulated in this process by refused allocations, or real as a small file system."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest


@contextlib.contextmanager
def full_error(*, in_place: bool = True) -> Iterator[None]:
    """Refuse every allocation in this process, and with `in_place=False` also writes to allocated space."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused = ["posix_fallocate"] if in_place else ["posix_fallocate", "pwrite"]
    with contextlib.ExitStack() as stack:
        for name in refused:
            stack.enter_context(mock.patch.object(os, name, refuse))
        yield


class SmallDisk:
    """A tmpfs at `path`, unmounted at the end of the block. `fill` uses all space, and `free` frees it again."""

    def __init__(self, path: Path, size_mb: int) -> None:
        self.path = path
        self._size_mb = size_mb
        self._ballast = path / "ballast"

    def __enter__(self) -> SmallDisk:
        self.path.mkdir(parents=True, exist_ok=True)
        options = f"size={self._size_mb}m,mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "headrace-test", str(self.path)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise PermissionError(f"a small filesystem cannot be mounted here: {process.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    def fill(self) -> None:
        """Fill the disk. A repeated call uses space that was freed meanwhile."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def leave(self, free_bytes: int) -> None:
        """Fill the disk except for about `free_bytes`."""
        self._ballast.unlink(missing_ok=True)
        with self._ballast.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes - free_bytes))

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def small_disk(path: Path, size_mb: int) -> Iterator[SmallDisk]:
    """Mount a small file system. Skip the test where that is not allowed."""
    disk = SmallDisk(path, size_mb)
    try:
        disk.__enter__()
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(str(error))
    try:
        yield disk
    finally:
        disk.__exit__()


class MeasuredDisk:
    """Simulated disk of 1 GB; a test sets the free bytes that `statvfs` reports."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def statvfs(self, _folder: object) -> os.statvfs_result:
        blocks = self.free_bytes // 4096
        return os.statvfs_result((4096, 4096, 262_144, blocks, blocks, 0, 0, 0, 0, 255))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[MeasuredDisk]:
        """Let this process see the disk at every path."""
        with mock.patch.object(os, "statvfs", self.statvfs):
            yield self
