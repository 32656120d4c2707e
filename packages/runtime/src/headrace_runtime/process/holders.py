"""Names of lease holders, from which other processes on the same machine can detect that the holder is dead.

So they need not wait until its lease expires. For a holder on another machine or in another container they cannot
detect it, and have to observe whether the holder renews its lease.
"""

from __future__ import annotations

import os
import socket
import uuid
from functools import cache
from pathlib import Path

_STATE, _STARTED = 0, 19
"""Indices of fields of /proc/<pid>/stat, counted after the name of the program."""


def new_holder() -> str:
    """Return a new, unique name of this process as a lease holder."""
    return "|".join((*_pid_scope(), str(os.getpid()), _start_ticks(os.getpid()) or "", uuid.uuid4().hex))


def is_dead(holder: str) -> bool:
    """Return whether the process of a holder is certainly dead. False if this process cannot determine it."""
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


def describe(holder: str) -> str:
    """Return a description of a holder for messages."""
    parts = holder.split("|")
    return f"process {parts[3]} on {parts[0]}" if len(parts) == 6 else holder


@cache
def _pid_scope() -> tuple[str, str, str]:
    """Return machine, boot and process namespace, within which a process id is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), "", ""


def _start_ticks(pid: int) -> str | None:
    """Return the start time of a process in the kernel's ticks, because process ids are reused.

    The result is None for a dead process, and an empty string on systems without /proc.
    """
    path = Path(f"/proc/{pid}/stat")
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else ""
    return None if fields[_STATE] in "ZX" else fields[_STARTED]
