"""Pytest plugin that prints the progress and the running tests every ten seconds.

pytest itself prints a line only when it is full of dots, which takes an hour with tests of several minutes. On a
terminal single dots are visible, so there the plugin prints no lines.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace_cli.terminal import ProgressDisplay


def begin(config: pytest.Config) -> None:
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
        self._progress.update(doing="running " + ", ".join(name.rpartition("::")[2] for name in self._running))


def _write(reporter: pytest.TerminalReporter, line: str) -> None:
    reporter.ensure_newline()
    reporter.write_line(line)
    reporter.flush()
