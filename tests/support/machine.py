"""Conditions of a machine (a full disk, a wrong clock of a process, the time that blocks an event loop), and the
operations that work costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import pytest

from headrace_runtime.process.event_loop import LoopWatch


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


SOURCE = Path(__file__).with_name("wrong_clock.c")


def missing_compiler() -> str | None:
    """Return why a wrong clock is impossible here, or None."""
    return None if shutil.which("cc") else "there is no C compiler"


def clock_environ(folder: Path, file: Path) -> dict[str, str]:
    """Return an environment in which a process has the clock that `step_clock(file, ...)` sets.

    `folder` keeps the library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "wrong_clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    file.write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(file)}


def step_clock(file: Path, by_s: float) -> None:
    """Set the clock's error to `by_s` seconds. The file is written in place, because processes have mapped it."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("q", round(by_s * 1e9)))


@dataclass(slots=True)
class Block:
    """Longest block of the loop in CPU seconds, which other load does not change. `busy_s` is set at the end of the
    block.
    """

    busy_s: float = 0.0


@contextlib.asynccontextmanager
async def blocked() -> AsyncIterator[Block]:
    """Measure the longest time for which code in the `async with` body keeps the loop busy without a pause.

    Garbage collection is off meanwhile: a collection that scans the objects of thousands of tests takes 100 ms.
    """
    watch = LoopWatch(interval_s=0.005)
    running = asyncio.create_task(watch.run())
    block = Block()
    gc.disable()
    try:
        await asyncio.sleep(0)  # so that its first look is before the work
        yield block
        await asyncio.sleep(0.02)  # so that its last look is after it
    finally:
        running.cancel()
        block.busy_s = watch.take()
        gc.enable()


def count_operations(work: Callable[[], object]) -> int:
    """Run `work`, and return the number of bytecode instructions that it executes in this thread.

    Work inside of one instruction, such as a copy of a set, counts as one.
    """
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
