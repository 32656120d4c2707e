"""The name of a lease holder. On the machine of the holder, the name tells whether its process still runs.

A death that can be seen need not be waited for. A name from another machine, or from another container on this one,
says nothing: whoever wants the lease then watches whether its holder gives a sign of life.
"""

from __future__ import annotations

import os
import socket
import uuid
from functools import cache
from pathlib import Path

_STATE, _STARTED = 0, 19
"""Fields of /proc/<pid>/stat behind the name of the program."""


def me() -> str:
    """A name for this process as a holder; each call gives another one."""
    return "|".join((*_place(), str(os.getpid()), _started(os.getpid()) or "", uuid.uuid4().hex))


def died(holder: str) -> bool:
    """Whether the process that `me` named is known to be dead. False when that cannot be known from here."""
    parts = holder.split("|")
    if len(parts) != 6 or tuple(parts[:3]) != _place() or not parts[3].isdigit():
        return False
    pid = int(parts[3])
    if pid == os.getpid():
        return True  # ours, from an earlier life with the same number, or given up by this one
    if parts[4]:
        return _started(pid) != parts[4]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def describe(holder: str) -> str:
    """For people."""
    parts = holder.split("|")
    return f"process {parts[3]} on {parts[0]}" if len(parts) == 6 else holder


@cache
def _place() -> tuple[str, str, str]:
    """Machine, boot and process namespace: where a process number means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), "", ""


def _started(pid: int) -> str | None:
    """When the process began, in the kernel's ticks: its number may be given again. None for the dead, "" where the
    kernel does not say."""
    path = Path(f"/proc/{pid}/stat")
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else ""
    return None if fields[_STATE] in "ZX" else fields[_STARTED]
