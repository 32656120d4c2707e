"""A line in the log every ten seconds with the progress of the tests and the running ones.

pytest itself writes a line when it is full of dots, which takes tests that play for minutes an hour. A terminal shows
single dots, so there are no such lines.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace_cli.progress import ProgressDisplay


def begin(config: pytest.Config) -> None:
    """Report where workers test and this process collects (`--numprocesses`, as in `make`): output of a process that
    tests
    by itself would belong to the test.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not reporter.isatty and config.getoption("numprocesses", None):
        config.pluginmanager.register(Heartbeat(reporter), "heartbeat")


class Heartbeat:
    """Record the starts and ends of the workers' tests."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._running: dict[str, None] = {}
        self._progress = ProgressDisplay("tests", unit="tests", log=lambda line: _write(reporter, line))

    def pytest_sessionstart(self) -> None:
        self._progress.__enter__()

    def pytest_sessionfinish(self) -> None:
        self._progress.__exit__()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[Any]) -> None:
        """Each worker finds all of them."""
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
