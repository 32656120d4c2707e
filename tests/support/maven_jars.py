"""Jars from Maven for tests, downloaded once into the cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


def missing(pom: Path, folder: Path, description: str, *programs: str) -> str | None:
    """Return why the dependencies of the pom cannot be put into `folder`, or None if they are there.

    The first call, and the first one after a change of the pom, downloads them.
    """
    for program in ("java", "mvn", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        complete = folder / "complete"
        if not complete.exists() or complete.read_text() != pom.read_text():
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
            result = subprocess.run(
                [*command, f"-DoutputDirectory={folder}"], capture_output=True, text=True, check=False
            )
            if result.returncode:
                return f"Maven could not fetch {description}: {result.stdout[-300:]}"
            complete.write_text(pom.read_text())
    return None
