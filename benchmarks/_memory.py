"""Peak memory of this process. The module does not import Headrace, so that the compared programs can use it."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes.

    On Linux it is read from `/proc`, because `getrusage` starts with the peak of the parent process.
    """
    if _STATUS.exists():
        (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
