"""Output to a terminal. Text from outside cannot control the terminal, hide characters or break the markup."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from headrace_schemas.values.text import printable_lines

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
    """Return a console that cleans all text and interprets only the markup of Headrace's own styles."""
    terminal = CleanConsole(stderr=stderr, soft_wrap=True, highlight=False)
    if not terminal.is_terminal and "COLUMNS" not in os.environ:
        terminal.width = _LOG_WIDTH  # a folded path cannot be copied out of a log
    return terminal


def echo(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Write plain text of one or more lines, cleaned; an `error` goes to standard error, in red on a terminal."""
    printable = printable_lines(text, _LENGTH_MAX)
    if error:
        typer.secho(printable, err=True, fg=typer.colors.RED, nl=end == "\n")
    else:
        typer.echo(printable, nl=end == "\n")


def echo_json(text: str) -> None:
    """Write a JSON text of any length in ASCII: programs read the same values, and a terminal shows the escapes."""
    typer.echo(ascii_json(text))


def ascii_json(text: str) -> str:
    """Escape all characters of a JSON text that are not ASCII; outside of strings JSON has none."""
    return _NOT_ASCII.sub(lambda match: _escape(match[0]), text)


def write_raw(value: bytes) -> None:
    """Write bytes unchanged to a pipe or a file; clean them for a terminal."""
    if sys.stdout.isatty():
        echo(value.decode("utf-8", "replace"))
    else:
        sys.stdout.buffer.write(value)


class CleanConsole(Console):
    """Rich console that makes control characters visible and interprets only the markup of Headrace's own styles."""

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
