"""Packages from Maven and npm for tests, downloaded once into the cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
NODE_FOLDER = ROOT / ".cache" / "producers"


def missing_jars(pom: Path, folder: Path, description: str, *programs: str) -> str | None:
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


def missing_node_client() -> str | None:
    """Return why the example cannot run here, or None. The first call downloads kafkajs."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    NODE_FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{NODE_FOLDER}.lock"):
        return _fetch_node_client()


def _fetch_node_client() -> str | None:
    shutil.copytree(ROOT / "examples" / "producers", NODE_FOLDER, dirs_exist_ok=True)
    if not (NODE_FOLDER / "node" / "node_modules" / "kafkajs").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
        process = subprocess.run(command, cwd=NODE_FOLDER / "node", capture_output=True, text=True, check=False)
        if process.returncode:
            return f"npm could not fetch kafkajs: {process.stderr[-300:]}"
    return None
