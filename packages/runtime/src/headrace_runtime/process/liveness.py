"""Heartbeats of a process to its parent, and names of lease holders, by which other processes detect that a holder is
dead.

A supervisor kills and restarts a process that has sent no heartbeat for a certain time. The event loop sends the
heartbeats, so a blocked loop sends none. Long work runs in threads, but on an overloaded machine, or if a library holds
the interpreter lock, it can delay the loop nevertheless. So long work calls `progress` after each of its parts, from
any thread, which sends a heartbeat, too. A part that never ends sends none.

In contrast to HTTP responses, heartbeats also arrive under load. Only time in which the parent itself runs counts as
silence.

The name of a lease holder (`new_holder`) contains its process. By it, other processes on the same machine detect that
the holder is dead (`is_dead`), so they need not wait until its lease expires. For a holder on another machine or in
another container they cannot detect it, and have to observe whether the holder renews its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
import uuid
from collections.abc import AsyncIterator, Iterator, MutableMapping
from functools import cache
from pathlib import Path

VARIABLE = "LIVENESS_FD"
INTERVAL_S = 0.5
_STATE, _STARTED = 0, 19
"""Positions of fields in /proc/<pid>/stat, counted after the name of the program."""


class _Pipe:
    """Pipe to the parent process. It is global like standard output, because work at any depth reports progress."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._written_s = 0.0

    def write(self) -> None:
        """Send a heartbeat. Errors of a full pipe or a missing reader are ignored."""
        if self.descriptor is not None:
            self._written_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(self.descriptor, b".")

    def progress(self) -> None:
        """Send a heartbeat, unless one was sent less than half an interval ago."""
        if self.descriptor is not None and time.monotonic() - self._written_s >= INTERVAL_S / 2:
            self.write()


_PIPE = _Pipe()


def progress() -> None:
    """Send a heartbeat because long work has finished a part, such as a pass, a layer or some megabytes.

    The call is cheap, and any thread may make it.
    """
    _PIPE.progress()


def take_inherited_pipe(environ: MutableMapping[str, str]) -> int | None:
    """Return the file descriptor of the pipe that this process inherited, or None. Child processes of this process will
    not inherit it."""
    text = environ.pop(VARIABLE, "")
    if not text.isdecimal():
        return None
    try:
        os.set_inheritable(int(text), False)
        os.set_blocking(int(text), False)
    except OSError:  # a program in between has closed it, so the variable is not for this process
        return None
    return int(text)


@contextlib.asynccontextmanager
async def send_heartbeats(pipe: int | None) -> AsyncIterator[None]:
    """Send heartbeats from the event loop to `pipe` while the body runs."""
    _PIPE.descriptor = pipe
    task = asyncio.create_task(_beat()) if pipe is not None else None
    try:
        yield
    finally:
        _PIPE.descriptor = None
        if task is not None:
            task.cancel()


async def _beat() -> None:
    while True:
        _PIPE.write()
        await asyncio.sleep(INTERVAL_S)


_READ_BYTES, _READS_MAX = 4096, 64
_POLL_S_MAX = 4.0
"""Maximum seconds between two polls that count as silence. A longer time means that the watching process itself was
stopped (SIGSTOP, a sleeping machine, a frozen container)."""


class LivenessWatch:
    """Watch of the heartbeats of one child process. Call `open` before each start of the child, `started` after it, and
    `poll` often."""

    def __init__(self) -> None:
        self.reading: int | None = None
        """The reading end of the pipe, or None before the first `open` and after `close`."""
        self._writing: int | None = None
        self._polled_s = 0.0
        self.silent_s = 0.0
        """Observed seconds since the last heartbeat."""
        self.beats = False
        """Whether the process has sent a heartbeat since its start. Programs without `liveness` never send one."""
        self.ended = False
        """Whether the process has closed the pipe, because it ends or does not use it."""

    def open(self) -> int:
        """Open a pipe, and return the file descriptor that the child must inherit and find in the variable
        `liveness.VARIABLE`."""
        self.close()
        self.reading, self._writing = os.pipe()
        os.set_blocking(self.reading, False)
        return self._writing

    def started(self, now_s: float) -> None:
        """Begin to count silence. Call it after the child has inherited the file descriptor."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        self._polled_s, self.silent_s, self.beats, self.ended = now_s, 0.0, False, False

    def poll(self, now_s: float) -> None:
        """Read heartbeats, and add the time since the last poll to the silence if there are none."""
        self.silent_s += min(now_s - self._polled_s, _POLL_S_MAX)
        self._polled_s = now_s
        if self._read_heartbeats():
            self.beats = True
            self.note_sign_of_life()

    def note_sign_of_life(self) -> None:
        """Reset the silence, after a heartbeat or an HTTP response."""
        self.silent_s = 0.0

    def close(self) -> None:
        for end in (self.reading, self._writing):
            if end is not None:
                os.close(end)
        self.reading = self._writing = None

    def _read_heartbeats(self) -> bool:
        """Read all bytes of the pipe, and return whether there were any."""
        has_beaten = False
        if self.reading is not None:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS_MAX):  # a process may write faster than this one reads
                    if not os.read(self.reading, _READ_BYTES):
                        self.ended = True
                        break
                    has_beaten = True
        return has_beaten


def new_holder() -> str:
    """Return a new, unique name by which this process can hold leases."""
    return "|".join((*_pid_scope(), str(os.getpid()), _start_ticks(os.getpid()) or "", uuid.uuid4().hex))


def is_dead(holder: str) -> bool:
    """Return whether the process of a lease holder is certainly dead. False if this process cannot find out."""
    parts = holder.split("|")
    if len(parts) != 6 or tuple(parts[:3]) != _pid_scope() or not parts[3].isdigit():
        return False
    pid = int(parts[3])
    if pid == os.getpid():
        return True  # an earlier process with the same id, or a lease that this process has given up
    if parts[4]:
        return _start_ticks(pid) != parts[4]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


_HOLDER_FILE, _HOLDER_BYTES_MAX = "holder", 4096


def claim_folder(folder: Path) -> None:
    """Note in a folder of this process that it belongs to this process, for `abandoned_folders`."""
    (folder / _HOLDER_FILE).write_text(new_holder(), encoding="utf-8")


def abandoned_folders(parent: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders of dead processes of this user, such as those in `/tmp` that match `pattern`.

    Other users may create folders there, too. Those, and folders whose process may run in another container, are left
    out.
    """
    own_process = new_holder().rpartition("|")[0]
    for folder in parent.glob(pattern):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _HOLDER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                holder = file.read(_HOLDER_BYTES_MAX).decode("utf-8", "replace")
            if holder.rpartition("|")[0] != own_process and is_dead(holder):
                yield folder


def describe(holder: str) -> str:
    """Return the process id and the machine of a lease holder, for messages."""
    parts = holder.split("|")
    return f"process {parts[3]} on {parts[0]}" if len(parts) == 6 else holder


@cache
def _pid_scope() -> tuple[str, str, str]:
    """Return host name, boot id and process namespace, within which a process id is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), "", ""


def _start_ticks(pid: int) -> str | None:
    """Return the start time of a process in clock ticks of the kernel, which distinguishes it from an earlier process
    with the same id.

    The result is None for a dead process, and an empty string on systems without /proc.
    """
    path = Path(f"/proc/{pid}/stat")
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else ""
    return None if fields[_STATE] in "ZX" else fields[_STARTED]
