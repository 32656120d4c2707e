"""Debian's Chromium, driven by programs that run in the environment `.venv-browser`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON, CHROMIUM = ROOT / ".venv-browser/bin/python", Path("/usr/bin/chromium")


def missing() -> str | None:
    """Return why no browser can be driven here, None when one can."""
    if not CHROMIUM.exists():
        return "there is no chromium; apt-get install --no-install-recommends chromium"
    return None if PYTHON.exists() else "there is no .venv-browser; make install GROUP=browser"


def drive(program: Path, task: object, timeout_s: float = 600.0) -> dict[str, Any]:
    """Run `program` with `task` as JSON and return the JSON that it prints."""
    process = subprocess.run(
        [PYTHON, program], input=json.dumps(task), stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer
