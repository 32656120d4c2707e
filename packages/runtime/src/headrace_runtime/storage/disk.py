"""Small private files that are replaced atomically, detection of full disks, and waiting for free space.

A service does not end because of a full disk: it logs the problem, waits, and continues once an operator has freed
space. All messages name the folder.
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

from headrace_runtime.errors import DiskFull, SettingError
from headrace_runtime.process.logs import get_logger

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
_MEASURE_S = 0.1
_NAMES_MAX = 10_000


def is_full(error: BaseException) -> bool:
    """Return whether `error` or one of its causes means that the disk or the quota is full."""
    return any(map(_means_full, _causes(error)))


def full_error(path: Path | str) -> DiskFull:
    """Return the error for a full disk of `path`."""
    return DiskFull(f"disk: no space left on {path}; free space there, a restart is not needed")


def problem(folder: Path, free_bytes_min: int | None = None, *, next_bytes: int = 0) -> str | None:
    """Return a message if `folder` has too little free space to be written, else None. Blocks.

    The function writes a temporary file, so that it detects quotas, too.

    Args:
        folder: An existing folder of the disk.
        free_bytes_min: Bytes that must stay free; None for the smaller of 1 GiB and 5 % of the disk.
        next_bytes: Bytes that are about to be written.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            _allocate(probe.fileno(), min(free_bytes_min or _PROBE_BYTES_MAX, _PROBE_BYTES_MAX))
        return _Space.of(folder, free_bytes_min).shortage(folder, next_bytes)
    except OSError as error:
        return str(full_error(folder)) if is_full(error) else f"disk: {folder} cannot be written: {error.strerror}"


class _Space(NamedTuple):
    """Free bytes of a disk, and the minimum of bytes that must stay free."""

    free: int
    free_min: int

    @classmethod
    def of(cls, folder: Path, free_bytes_min: int | None) -> _Space:
        """Measure the disk of `folder`. Raises `OSError`."""
        space = os.statvfs(folder)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free_bytes_min is None:
            free_bytes_min = min(_FREE_BYTES_MIN, int(size * _FREE_SHARE_MIN))
        return cls(free, free_bytes_min)

    def shortage(self, folder: Path, next_bytes: int = 0) -> str | None:
        """Return a message if writing `next_bytes` to `folder` would leave too little free space, else None."""
        if self.free >= self.free_min + next_bytes:
            return None
        upcoming = f"{_megabytes(next_bytes)} are written next and " if next_bytes else ""
        return (
            f"disk: {_megabytes(self.free)} are free on {folder}, where {upcoming}{_megabytes(self.free_min)} have to "
            "stay free; free space there or set disk_free_bytes_min lower, a restart is not needed"
        )


class DiskGuard:
    """Check of free space that stops writes before a disk is full, and permits them again once there is space.

    It measures the disk at most ten times a second. In between it subtracts the bytes that were written.
    """

    def __init__(self, folder: Path, free_bytes_min: int | None = None, *, share: float = 1.0) -> None:
        """Create the check for the disk of `folder`, which must exist when `shortage` is called.

        Args:
            folder: A folder of the disk.
            free_bytes_min: Bytes that must stay free; None for the smaller of 1 GiB and 5 % of the disk.
            share: The part of these bytes that this guard keeps free. It is smaller for more important work.
        """
        self._folder = folder
        self._free_bytes_min = free_bytes_min
        self._share = share
        self._space = _Space(0, 0)
        self._measured_s = -math.inf
        self._is_short = False

    def shortage(self, next_bytes: int = 0) -> str | None:
        """Return a message if `next_bytes` must not be written now, else None.

        After None the caller is expected to write the bytes, which are subtracted from the free space.
        """
        now_s = time.monotonic()
        if now_s - self._measured_s > _MEASURE_S or self._space.free < self._space.free_min + next_bytes:
            space = _Space.of(self._folder, self._free_bytes_min)
            self._space = space._replace(free_min=round(space.free_min * self._share))
            self._measured_s = now_s
        shortage = self._space.shortage(self._folder, next_bytes)
        if (shortage is not None) != self._is_short:
            self._is_short = shortage is not None
            log.error("disk_low", error=shortage) if shortage else log.info("disk_has_room", folder=str(self._folder))
        if shortage is None:
            self._space = self._space._replace(free=self._space.free - next_bytes)
        return shortage

    async def wait_for_room(self) -> None:
        """Wait until the disk has enough free space."""
        while self.shortage() is not None:  # noqa: ASYNC110 (a disk does not notify anyone of free space)
            await asyncio.sleep(_WAIT_S)


def check_room(folder: Path, next_bytes: int, free_bytes_min: int | None = None) -> None:
    """Check that `next_bytes` fit on the disk of `folder` so that `free_bytes_min` stay free (see `problem`). Raises
    `DiskFull`."""
    reason = problem(folder, free_bytes_min, next_bytes=next_bytes)
    if reason is not None:
        raise DiskFull(reason)


async def retry_while_full(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work`, and repeat it while it raises `DiskFull`. Return its result."""
    is_logged = False
    while True:
        try:
            return await work()
        except DiskFull as error:
            if not is_logged:
                log.error("disk_full", error=str(error))
            is_logged = True
        await asyncio.sleep(_WAIT_S)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes, including the driver's error in the attribute `orig` of SQLAlchemy's exceptions."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__cause__, getattr(cause, "orig", None)]
        if isinstance(cause, BaseExceptionGroup):
            waiting += cause.exceptions


def _means_full(error: BaseException) -> bool:
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
