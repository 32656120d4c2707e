"""Progress of long work: a bar in a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LOG_INTERVAL_S = 10.0


class ProgressDisplay:
    """Progress of one piece of work, used in a `with` block. It is written to standard error, so results can be piped.

    In a log a line is written at every interval even if the progress has not changed, so that work that hangs can be
    distinguished from slow work.

    Args:
        title: name of the work.
        total: amount of work in `unit`s; None if it is not known yet.
        unit: unit of `total`, in the plural.
        doing: the current activity.
        estimate: whether to show the remaining time; False for work that may end before its total.
        console: where the bar is drawn; standard error by default.
        log: receives the lines instead of the console; no bar is drawn then.
        interval_s: seconds between two log lines.
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        unit: str = "",
        doing: str = "",
        estimate: bool = True,
        console: Console | None = None,
        log: Callable[[str], None] | None = None,
        interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        self.title, self.total, self.completed, self.doing = title, total, 0.0, doing
        self._unit = unit
        self._estimate = estimate
        self._console = console
        self._log = log
        self._interval_s = interval_s
        self._started_s = time.monotonic()
        self._finished = threading.Event()
        self._bar: tuple[Bar, TaskID] | None = None
        self._log_thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._log is None:
            from headrace_cli.terminal import console

            self._console = self._console or console(stderr=True)
        if self._console is not None and self._console.is_terminal and self._log is None:
            self._bar = self._open_bar(self._console)
        else:
            self._log_thread = threading.Thread(
                target=self._log_periodically, name=f"progress of {self.title}", daemon=True
            )
            self._log_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self._log_thread is not None:
            self._log_thread.join()
        if self._bar is not None:
            self._bar[0].stop()

    def advance(self, by: float = 1, doing: str | None = None) -> None:
        """Add `by` to the completed amount. `doing` names the next activity."""
        self.update(self.completed + by, doing=doing)

    def update(self, completed: float | None = None, total: float | None = None, doing: str | None = None) -> None:
        """Set the completed amount, the total and the current activity. An argument that is None changes nothing."""
        self.completed = self.completed if completed is None else completed
        self.total = self.total if total is None else total
        self.doing = self.doing if doing is None else doing
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.completed, total=self.total, doing=self.doing)

    def print_line(self, line: str) -> None:
        """Print a permanent line: above the bar, or at once in the log."""
        if self._log is not None:
            self._log(line)
        elif self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def line(self) -> str:
        """The current progress as one line for a log."""
        elapsed_s = time.monotonic() - self._started_s
        amount = f"{self.completed:,.0f}" + (f" of {self.total:,.0f}" if self.total is not None else "")
        has_amount = bool(self.completed or self.total)
        parts = [f"{amount} {self._unit}".rstrip() if has_amount else "", self.doing, f"{elapsed_s:.0f} s"]
        if self._estimate and self.total and self.completed:
            parts.append(f"about {elapsed_s / self.completed * (self.total - self.completed):.0f} s left")
        return f"{self.title}: " + ", ".join(filter(None, parts))

    def _log_periodically(self) -> None:
        while not self._finished.wait(self._interval_s):
            self.print_line(self.line)

    def _open_bar(self, console: Console) -> tuple[Bar, TaskID]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self._unit)]
        columns += [TimeElapsedColumn(), *([TimeRemainingColumn()] if self._estimate else [])]
        columns += [TextColumn("{task.fields[doing]}", markup=False)]
        # Output that goes to a file stays there; only output to the same terminal has to be redirected above the bar.
        bar = Bar(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        bar.start()
        return bar, bar.add_task(self.title, total=self.total, doing=self.doing)
