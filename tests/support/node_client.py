"""The Node example with its single dependency, installed once into the cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "producers"


def missing() -> str | None:
    """Return why the example cannot run here, or None. The first call downloads kafkajs."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{FOLDER}.lock"):
        return _fetched()


def _fetched() -> str | None:
    shutil.copytree(ROOT / "examples" / "producers", FOLDER, dirs_exist_ok=True)
    if not (FOLDER / "node" / "node_modules" / "kafkajs").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
        process = subprocess.run(command, cwd=FOLDER / "node", capture_output=True, text=True, check=False)
        if process.returncode:
            return f"npm could not fetch kafkajs: {process.stderr[-300:]}"
    return None
