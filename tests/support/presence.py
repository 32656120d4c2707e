"""External servers and programs that tests need, and the skip or failure of tests without them.

`drive` runs a program with Debian's Chromium in the environment `.venv-browser`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import downloads, java_agent, postgres_node
from tests.support.buses import missing_kafka

REQUIRED = frozenset(filter(None, os.environ.get("REQUIRED_SERVERS", "").split(",")))
"""Names whose absence is a failure: continuous integration sets all of them."""


CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
"""Python of the environment with agents of other projects; see the group `clients` in pyproject.toml."""


HELM = Path(__file__).parents[2] / ".venv-helm"
"""Folder with helm, kubeconform and the schemas that the chart must conform to."""


def _program(name: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(name) else f"{name} is not installed"


CHECKS: dict[str, Callable[[], str | None]] = {
    "kafka": missing_kafka,
    "postgres": postgres_node.missing,
    "kcat": _program("kcat"),
    "node": _program("node"),
    "jq": _program("jq"),
    "kafkajs": downloads.missing_node_client,
    "agentscope-java": java_agent.missing,
    "clients": lambda: None if CLIENTS.exists() else "there is no .venv-clients; make install GROUP=clients",
    "vllm": lambda: None if find_spec("vllm") else "the package is not installed here; make check NAME=vllm has it",
    "helm": lambda: None if (HELM / "installed").exists() else "there is no .venv-helm; make install GROUP=helm",
}
used: set[str] = set()
absent: dict[str, str] = {}


def need(name: str) -> None:
    """Skip the test if `name` is missing, or fail it if `name` is required."""
    reason = CHECKS[name]()
    if reason is None:
        used.add(name)
        return
    absent[name] = reason
    if name in REQUIRED:
        pytest.fail(f"{name} is required here: {reason}")
    pytest.skip(f"{name}: {reason}")


ROOT = Path(__file__).parents[2]
PYTHON, CHROMIUM = ROOT / ".venv-browser/bin/python", Path("/usr/bin/chromium")


def missing() -> str | None:
    """Return why no browser can be controlled here, or None."""
    if not CHROMIUM.exists():
        return "there is no chromium; apt-get install --no-install-recommends chromium"
    return None if PYTHON.exists() else "there is no .venv-browser; make install GROUP=browser"


def drive(program: Path, task: object, timeout_s: float = 600.0) -> dict[str, Any]:
    """Run the file `program` with `task` as JSON on its standard input, and return the JSON that it prints."""
    module = ".".join(program.resolve().relative_to(ROOT).with_suffix("").parts)
    process = subprocess.run(
        [PYTHON, "-m", module],
        input=json.dumps(task),
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
        cwd=ROOT,
    )
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer
