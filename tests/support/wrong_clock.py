"""A wall clock that is wrong, for a whole process with all its libraries. Monotonic clocks go on."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def missing() -> str | None:
    """Why there can be no wrong clock here."""
    return None if shutil.which("cc") else "there is no C compiler"


def environ(folder: Path, file: Path) -> dict[str, str]:
    """The environment in which a process has the clock that `step(file, ...)` sets. `folder` keeps the library."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "wrong_clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    file.write_bytes(struct.pack("q", 0))
    return {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(file)}


def step(file: Path, by_s: float) -> None:
    """From now on the clock is `by_s` off. The file stays the same one: processes have it mapped."""
    with file.open("r+b") as opened:
        opened.write(struct.pack("q", round(by_s * 1e9)))
