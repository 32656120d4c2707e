"""How much memory this process has held. No part of Headrace is needed for it, so peers use it too."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """`getrusage` on Linux would begin with the peak of the process that started this one."""
    if _STATUS.exists():
        (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
