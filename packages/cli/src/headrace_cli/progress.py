"""How far long work is: a bar in a terminal, a line every ten seconds in a log."""

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

EVERY_S = 10.0


class ProgressDisplay:
    """One piece of work, in a `with` block. It is written to standard error, so that results can be piped.

    `total` is in `unit`s; None means that nobody knows it yet. `estimate=False` is for work that may end before its
    total, so that the time which is left cannot be told. In a log a line also comes when nothing has moved: work that
    hangs can be told from work that is slow. `log` takes these lines instead of the console, and there is no bar then.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        unit: str = "",
        doing: str = "",
        estimate: bool = True,
        console: Console | None = None,
        log: Callable[[str], None] | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.what, self.total, self.done, self.doing = what, total, 0.0, doing
        self._unit = unit
        self._estimate = estimate
        self._console = console
        self._log = log
        self._every_s = every_s
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._bar: tuple[Bar, TaskID] | None = None
        self._lines: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        if self._log is None:
            from headrace_cli.terminal import console

            self._console = self._console or console(stderr=True)
        if self._console is not None and self._console.is_terminal and self._log is None:
            self._bar = self._opened(self._console)
        else:
            self._lines = threading.Thread(target=self._tell, name=f"progress of {self.what}", daemon=True)
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._lines is not None:
            self._lines.join()
        if self._bar is not None:
            self._bar[0].stop()

    def advance(self, by: float = 1, doing: str | None = None) -> None:
        """So much more is done. `doing` says what comes next."""
        self.at(self.done + by, doing=doing)

    def at(self, done: float | None = None, total: float | None = None, doing: str | None = None) -> None:
        """How far it is. What is None stays as it was."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.doing = self.doing if doing is None else doing
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.done, total=self.total, doing=self.doing)

    def say(self, line: str) -> None:
        """A line that stays: above the bar, or at once in the log."""
        if self._log is not None:
            self._log(line)
        elif self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def line(self) -> str:
        """What a log says now."""
        took_s = time.monotonic() - self._began_s
        amount = f"{self.done:,.0f}" + (f" of {self.total:,.0f}" if self.total is not None else "")
        known = bool(self.done or self.total)
        parts = [f"{amount} {self._unit}".rstrip() if known else "", self.doing, f"{took_s:.0f} s"]
        if self._estimate and self.total and self.done:
            parts.append(f"about {took_s / self.done * (self.total - self.done):.0f} s left")
        return f"{self.what}: " + ", ".join(filter(None, parts))

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            self.say(self.line)

    def _opened(self, console: Console) -> tuple[Bar, TaskID]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self._unit)]
        columns += [TimeElapsedColumn(), *([TimeRemainingColumn()] if self._estimate else [])]
        columns += [TextColumn("{task.fields[doing]}", markup=False)]
        # Output that goes to a file stays there; only what goes to the same terminal has to pass the bar.
        bar = Bar(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        bar.start()
        return bar, bar.add_task(self.what, total=self.total, doing=self.doing)
