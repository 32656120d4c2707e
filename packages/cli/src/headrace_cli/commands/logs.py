"""`headrace logs`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.shared import DataDir, command, console, folder

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}
_HIDDEN = {"event", "level", "time", "logger", "service"}
_POLL_S = 0.2


def _log_names() -> list[str]:
    return sorted(path.stem for path in (folder(None) / "logs").glob("*.log"))


def logs(
    service: Annotated[
        str | None,
        typer.Argument(help="Show only this service.", metavar="[SERVICE]", autocompletion=_log_names),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new lines as they are written.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of lines of each service.")] = 20,
    raw: Annotated[bool, typer.Option("--raw", help="Print lines as they were written, usually JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the logs of the services, oldest lines first; also of services that do not run."""
    from headrace.errors import UsageError

    log_dir = folder(data_dir) / "logs"
    paths = sorted(log_dir.glob("*.log"))
    if service is not None:
        paths = [path for path in paths if path.stem == service]
    if not paths:
        names = ", ".join(path.stem for path in sorted(log_dir.glob("*.log"))) or "none"
        raise UsageError(f"{log_dir}: has no log of {service or 'any service'}; it has the logs of: {names}")
    tails = [Tail(path) for path in paths]
    log_lines = [(line, tail.name) for tail in tails for line in tail.last_lines(lines)]
    _show(sorted(log_lines, key=lambda pair: _time(pair[0])), paths, raw)
    while follow:
        _show([(line, tail.name) for tail in tails for line in tail.new_lines()], paths, raw)
        time.sleep(_POLL_S)


class Tail:
    """Reader of a log file that a service is still writing and may rotate meanwhile."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path
        self._file = path.open("rb")
        self._rest = b""

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines of the file."""
        last_lines: deque[bytes] = deque(self._file, maxlen=count)
        return [line.decode("utf-8", "replace").rstrip("\n") for line in last_lines]

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines written since the last call.

        If the file was rotated, lines of the old file come first.
        """
        yield from self._lines()
        if self._path.exists() and self._path.stat().st_ino != _inode(self._file.fileno()):
            yield from self._lines()
            self._file.close()
            self._file = self._path.open("rb")
            yield from self._lines()

    def _lines(self) -> Iterator[str]:
        *complete_lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in complete_lines:
            yield line.decode("utf-8", "replace")


def _inode(descriptor: int) -> int:
    import os

    return os.fstat(descriptor).st_ino


def _parse_line(line: str) -> dict[str, object] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _time(line: str) -> str:
    parsed = _parse_line(line)
    return str(parsed.get("time", "")) if parsed else ""


def _show(log_lines: list[tuple[str, str]], paths: list[Path], raw: bool) -> None:
    from rich.text import Text

    names = [path.stem for path in paths]
    width = max(map(len, names))
    out = console()
    for line, name in log_lines:
        parsed = None if raw else _parse_line(line)
        prefix = Text(f"{name:<{width}} ", style=_COLOURS[names.index(name) % len(_COLOURS)])
        text = Text(line) if parsed is None else _format_entry(parsed)
        out.print(text if raw and len(names) == 1 else prefix + text)


def _format_entry(entry: dict[str, object]) -> object:
    from rich.text import Text

    level = str(entry.get("level", ""))
    fields = " ".join(f"{name}={value}" for name, value in entry.items() if name not in _HIDDEN | {"exception"})
    text = Text(f"{str(entry.get('time', ''))[11:19]} ", style="dim")
    text.append(f"{entry.get('event', '')} ", style=_LEVELS.get(level, "bold"))
    text.append(fields)
    if "exception" in entry:
        text.append(f"\n{entry['exception']}", style="red")
    return text


def add_to(app: typer.Typer) -> None:
    command(app, logs, "headrace logs", "headrace logs trainer -f", "headrace logs gateway -n 100 --raw")
