"""A wrong wall clock for a whole process with all its libraries. Monotonic clocks are unchanged."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def missing() -> str | None:
    """Return why a wrong clock is impossible here, or None."""
    return None if shutil.which("cc") else "there is no C compiler"


def environ(folder: Path, file: Path) -> dict[str, str]:
    """Return an environment in which a process has the clock that `step(file, ...)` sets.

    `folder` keeps the library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "wrong_clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    file.write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(file)}


def step(file: Path, by_s: float) -> None:
    """Set the clock's error to `by_s` seconds. The file is written in place, because processes have mapped it."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("q", round(by_s * 1e9)))
