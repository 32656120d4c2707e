"""Output to a terminal, and progress of long work: a bar in a terminal, a line every ten seconds in a log.

Control characters and markup in texts from outside have no effect.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from headrace_schemas.values.text import printable_lines

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


_LOG_WIDTH = 200
_LENGTH_MAX = 1_000_000
"""Maximum number of characters of one piece of output."""
_TAG = re.compile(r"(?<!\\)(\\*+)\[([^\[\]]*)\]")
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")
_STYLES = frozenset(
    {"bold", "dim", "italic", "on", "default", "white", *_COLOURS, *(f"bright_{name}" for name in _COLOURS)}
)
_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")


def console(*, stderr: bool = False) -> Console:
    """Return a console that cleans all text and interprets only Headrace's own markup."""
    terminal = CleanConsole(stderr=stderr, soft_wrap=True, highlight=False)
    if not terminal.is_terminal and "COLUMNS" not in os.environ:
        terminal.width = _LOG_WIDTH  # a folded path cannot be copied out of a log
    return terminal


def echo(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Write plain text of one or more lines with control characters made visible; an `error` goes to standard error."""
    printable = printable_lines(text, _LENGTH_MAX)
    if error:
        typer.secho(printable, err=True, fg=typer.colors.RED, nl=end == "\n")
    else:
        typer.echo(printable, nl=end == "\n")


def echo_json(text: str) -> None:
    """Write JSON text of any length in ASCII, with escapes for all other characters."""
    typer.echo(ascii_json(text))


def ascii_json(text: str) -> str:
    """Return JSON text with all characters that are not ASCII escaped. Outside of strings JSON has none."""
    return _NOT_ASCII.sub(lambda match: _escape(match[0]), text)


def write_raw(value: bytes) -> None:
    """Write bytes unchanged to a pipe or a file; clean them for a terminal."""
    if sys.stdout.isatty():
        echo(value.decode("utf-8", "replace"))
    else:
        sys.stdout.buffer.write(value)


class CleanConsole(Console):
    """Rich console that makes control characters visible and interprets only Headrace's own markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render `text` with Headrace's own styles as markup; other brackets, including links, are plain text.

        With `markup=False` all brackets are text.
        """
        plain = printable_lines(text, _LENGTH_MAX)
        if options.get("markup") is False:
            return super().render_str(plain, **options)
        try:
            return super().render_str(_TAG.sub(_keep_own_tag, plain), **options)
        except MarkupError:
            return super().render_str(plain, **{**options, "markup": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Clean every text segment, including those of tables, bars and progress displays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text, _LENGTH_MAX), segment.style)


def _keep_own_tag(match: re.Match[str]) -> str:
    words = match[2].removeprefix("/").split(" ")
    is_own_style = match[2] == "/" or (all(words) and set(words) <= _STYLES)
    return match[0] if is_own_style or match[1] else rf"\{match[0]}"


def _escape(character: str) -> str:
    return r"\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


LOG_INTERVAL_S = 10.0


class ProgressDisplay:
    """Progress of one piece of work, used in a `with` block. It is written to standard error, so results can be piped.

    In a log a line is written at every interval, even if the progress has not changed, so that readers can tell slow
    work from work that hangs.

    Args:
        title: name of the work.
        total: amount of work in `unit`s; None if it is not known yet.
        unit: unit of `total`, in the plural.
        activity: the current activity.
        estimate: whether to show the remaining time; False for work that may end before its total.
        console: console on which the bar is drawn; by default standard error.
        log: function that gets the lines instead of the console; then no bar is drawn.
        interval_s: seconds between two log lines.
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        unit: str = "",
        activity: str = "",
        estimate: bool = True,
        console: Console | None = None,
        log: Callable[[str], None] | None = None,
        interval_s: float = LOG_INTERVAL_S,
    ) -> None:
        self.title, self.total, self.completed, self.activity = title, total, 0.0, activity
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

    def advance(self, by: float = 1, activity: str | None = None) -> None:
        """Add `by` to the completed amount. `activity` names the next activity."""
        self.update(self.completed + by, activity=activity)

    def update(self, completed: float | None = None, total: float | None = None, activity: str | None = None) -> None:
        """Set the completed amount, the total and the current activity. An argument that is None changes nothing."""
        self.completed = self.completed if completed is None else completed
        self.total = self.total if total is None else total
        self.activity = self.activity if activity is None else activity
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self.completed, total=self.total, activity=self.activity)

    def print_line(self, line: str) -> None:
        """Print a permanent line above the progress bar, or in the log."""
        if self._log is not None:
            self._log(line)
        elif self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def line(self) -> str:
        """The present progress (amount, activity, time) as one line for a log."""
        elapsed_s = time.monotonic() - self._started_s
        amount = f"{self.completed:,.0f}" + (f" of {self.total:,.0f}" if self.total is not None else "")
        has_amount = bool(self.completed or self.total)
        parts = [f"{amount} {self._unit}".rstrip() if has_amount else "", self.activity, f"{elapsed_s:.0f} s"]
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
        columns += [TextColumn("{task.fields[activity]}", markup=False)]
        # Output that goes to a file stays there; only output to the same terminal has to be redirected above the bar.
        bar = Bar(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        bar.start()
        return bar, bar.add_task(self.title, total=self.total, activity=self.activity)
