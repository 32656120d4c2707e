"""Parts of a pytest run: seeds of random tests, the external servers and programs that tests need, and the display of
its progress.

`drive` runs a program with the Chromium of Debian in the environment `.venv-browser`. Progress is printed because
pytest itself prints a line only when it is full of dots, which takes an hour with tests of several minutes.

The default is fixed, so that a failing run points at the change under test. `make test TEST_SEED=random` explores.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace_cli.terminal import ProgressDisplay
from tests.support import packages, servers
from tests.support.servers import missing_kafka

REQUIRED = frozenset(filter(None, os.environ.get("REQUIRED_SERVERS", "").split(",")))
"""Names whose absence is a failure: continuous integration sets all of them."""

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
"""Python of the environment with agents of other projects; see the group `clients` in pyproject.toml."""

HELM = Path(__file__).parents[2] / ".venv-helm"
"""Folder with helm, kubeconform and the schemas that the chart must conform to."""
_SETTING = os.environ.get("TEST_SEED", "0")
_NUMBER = random.SystemRandom().randrange(2**31) if _SETTING == "random" else int(_SETTING)

FIXED = _SETTING != "random"
"""Whether every run with the same setting draws the same seeds."""


def _program(name: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(name) else f"{name} is not installed"


CHECKS: dict[str, Callable[[], str | None]] = {
    "kafka": missing_kafka,
    "postgres": servers.missing_postgres,
    "kcat": _program("kcat"),
    "node": _program("node"),
    "jq": _program("jq"),
    "kafkajs": packages.missing_node_client,
    "agentscope-java": packages.missing_java_agent,
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


def missing_browser() -> str | None:
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


def start_heartbeat(config: pytest.Config) -> None:
    """Start the plugin in the process that coordinates xdist workers (`--numprocesses`, as in `make`).

    Lines of a process that runs tests itself would become output of the running test.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not reporter.isatty and config.getoption("numprocesses", None):
        config.pluginmanager.register(Heartbeat(reporter), "heartbeat")


class Heartbeat:
    """Recorder of the starts and ends of the workers' tests."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._running: dict[str, None] = {}
        self._progress = ProgressDisplay("tests", unit="tests", log=lambda line: _write(reporter, line))

    def pytest_sessionstart(self) -> None:
        self._progress.__enter__()

    def pytest_sessionfinish(self) -> None:
        self._progress.__exit__()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[Any]) -> None:
        """Store the number of tests, which each worker collects completely."""
        self._progress.update(total=len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._tell()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._progress.advance()
        self._tell()

    def _tell(self) -> None:
        self._progress.update(activity="running " + ", ".join(name.rpartition("::")[2] for name in self._running))


def _write(reporter: pytest.TerminalReporter, line: str) -> None:
    reporter.ensure_newline()
    reporter.write_line(line)
    reporter.flush()


def draw_seed(label: str | None = None) -> int:
    """Return a 32-bit seed for `label`, by default for the running test, and print the command that repeats it."""
    label = label or os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
    print(f"TEST_SEED={_NUMBER}")
    return zlib.crc32(f"{_NUMBER}:{label}".encode())
