"""A full disk: which errors mean it, how it is probed, and how a service waits for room.

A full disk mends itself as soon as somebody makes room, so nobody ends because of it: what needs the disk waits, says
so, and goes on. Everything here names the folder, since that is what the reader has to look at.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace_runtime.errors import DiskFull
from headrace_runtime.logs import get_logger

T = TypeVar("T")
log = get_logger(__name__)
_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SQLITE_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,  # the index of the write-ahead log could not grow
    sqlite3.SQLITE_IOERR_TRUNCATE,
}
_POSTGRESQL_DISK_FULL = "53100"
_WAIT_S = 1.0
_PROBE_BYTES_MAX = 1_048_576
_FREE_BYTES_MIN, _FREE_SHARE_MIN = 1 << 30, 0.05
_LOOK_S = 0.1


def is_full(error: BaseException) -> bool:
    """Whether `error`, or what it was raised for, is a disk (or a quota) without room."""
    return any(_says_full(one) for one in _causes(error))


def no_room(place: Path | str) -> DiskFull:
    """The error that says it in our words."""
    return DiskFull(f"disk: no space left on {place}; make room there, nothing has to be restarted")


def trouble(folder: Path, free_bytes_min: int | None = None, *, next_bytes: int = 0) -> str | None:
    """Return why `folder` should not be written, None when it can be. Blocks.

    It is tried with a nameless file, so quotas count too.

    Args:
        folder: An existing folder of the disk.
        free_bytes_min: Bytes that stay free; None for the smaller of 1 GiB and 5 % of the disk.
        next_bytes: Bytes that are about to be written and have to fit as well.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            _allocate(probe.fileno(), min(free_bytes_min or _PROBE_BYTES_MAX, _PROBE_BYTES_MAX))
        return _Space.of(folder, free_bytes_min).shortage(folder, next_bytes)
    except OSError as error:
        return str(no_room(folder)) if is_full(error) else f"disk: {folder} cannot be written: {error.strerror}"


class _Space(NamedTuple):
    """Free bytes of a disk, and how many have to stay free."""

    free: int
    free_min: int

    @classmethod
    def of(cls, folder: Path, free_bytes_min: int | None) -> _Space:
        """Raises `OSError`."""
        space = os.statvfs(folder)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free_bytes_min is None:
            free_bytes_min = min(_FREE_BYTES_MIN, int(size * _FREE_SHARE_MIN))
        return cls(free, free_bytes_min)

    def shortage(self, folder: Path, next_bytes: int = 0) -> str | None:
        """Return why nothing more should be written to `folder`; None when there is room."""
        if self.free >= self.free_min + next_bytes:
            return None
        wanted = f"{_megabytes(next_bytes)} are written next and " if next_bytes else ""
        return (
            f"disk: {_megabytes(self.free)} are free on {folder}, where {wanted}{_megabytes(self.free_min)} have to "
            "stay free; make room there or set disk_free_bytes_min lower, nothing has to be restarted"
        )


class DiskGuard:
    """Stops growth before a disk is full, and lets it go on once there is room.

    The disk is looked at ten times a second at most; what is written in between is subtracted from what was free.
    """

    def __init__(self, folder: Path, free_bytes_min: int | None = None, *, share: float = 1.0) -> None:
        """Watch the disk of `folder`, which has to exist when `shortage` is called.

        Args:
            folder: A folder of the disk.
            free_bytes_min: Bytes that stay free; None for the smaller of 1 GiB and 5 % of the disk.
            share: The part of them that counts here. What must go on for longer than other work has a smaller one.
        """
        self._folder = folder
        self._free_bytes_min = free_bytes_min
        self._share = share
        self._space = _Space(0, 0)
        self._looked_s = -math.inf
        self._is_short = False

    def shortage(self, next_bytes: int = 0) -> str | None:
        """Return why `next_bytes` should not be written now; None when they may be. They count as written then."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S or self._space.free < self._space.free_min + next_bytes:
            space = _Space.of(self._folder, self._free_bytes_min)
            self._space = space._replace(free_min=round(space.free_min * self._share))
            self._looked_s = now_s
        shortage = self._space.shortage(self._folder, next_bytes)
        if (shortage is not None) != self._is_short:
            self._is_short = shortage is not None
            log.error("disk_low", error=shortage) if shortage else log.info("disk_has_room", folder=str(self._folder))
        if shortage is None:
            self._space = self._space._replace(free=self._space.free - next_bytes)
        return shortage

    async def wait_for_room(self) -> None:
        """Return once data may grow."""
        while self.shortage() is not None:  # noqa: ASYNC110 (a disk tells nobody that it has room)
            await asyncio.sleep(_WAIT_S)


def check_room(folder: Path, next_bytes: int, free_bytes_min: int | None = None) -> None:
    """Raise `DiskFull` unless `next_bytes` fit into `folder` and `free_bytes_min` stay free; see `trouble`."""
    reason = trouble(folder, free_bytes_min, next_bytes=next_bytes)
    if reason is not None:
        raise DiskFull(reason)


async def with_room(work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns, once there is room for it. It is called again while it raises `DiskFull`."""
    told = False
    while True:
        try:
            return await work()
        except DiskFull as error:
            if not told:
                log.error("disk_full", error=str(error))
            told = True
        await asyncio.sleep(_WAIT_S)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from; a driver's error hides in SQLAlchemy's `orig`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, getattr(one, "orig", None)]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _says_full(error: BaseException) -> bool:
    if isinstance(error, DiskFull):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) in _SQLITE_CODES:
        return True
    return getattr(error, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _allocate(handle: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.write(handle, bytes(size))
