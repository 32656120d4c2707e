"""What the commands share: options, errors, the console."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace_cli.commands.grouped import spread

if TYPE_CHECKING:
    from rich.console import Console

    from headrace_operations.supervisor.state import RunState, ServiceState

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", envvar="HEADRACE_DATA_DIR", help="Where Headrace keeps its data.", metavar="DIR"),
]
InternalKey = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="HEADRACE_SECURITY__INTERNAL_KEY", help="security.internal_key, if it was set.", metavar="KEY"
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="HEADRACE_CONFIG", help="A settings file (TOML).", metavar="FILE"),
]
BusAddress = Annotated[
    str | None, typer.Option("--bus", help="The bus, when it was not started by `up`.", metavar="HOST:PORT")
]
Overridden = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override a setting; may be repeated.", metavar="SECTION.KEY=VALUE"),
]
Pythons = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        help="Run a service with another environment's interpreter; may be repeated.",
        metavar="SERVICE=PATH",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True)
class BusOptions:
    """Which bus is meant: one that is named, or that of what runs here."""

    bus: BusAddress = None
    data_dir: DataDir = None

    @property
    def address(self) -> str:
        """Raises `NotRunning`."""
        if self.bus:
            know_stack(self.data_dir)
            return self.bus
        return running(self.data_dir).bus


class Commands(TyperGroup):
    """A group whose commands may raise `HeadraceError`: it is printed, and the exit status is 1, for wrong usage 2."""

    def invoke(self, ctx: Any) -> Any:
        from headrace.errors import HeadraceError, UsageError
        from headrace_operations.errors import StartFailed
        from headrace_runtime.errors import SettingError

        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            echo(f"headrace: {error}", error=True)
            raise typer.Exit(2 if isinstance(error, UsageError | StartFailed | SettingError) else 1) from None


def command(app: typer.Typer, function: Callable[..., None], *examples: str, name: str | None = None) -> None:
    """Add `function` to `app`; its docstring is the help, and `examples` show how it is used."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    shown = "\n\n".join(["[bold]Examples[/]", *examples])
    app.command(name, help=text, epilog=shown)(spread(function))


def folder(data_dir: Path | None, config: Path | None = None) -> Path:
    """The data directory that is meant: the option, the environment, the settings file, or the usual one."""
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of

    return data_dir_of(data_dir, Overrides(config, {}, os.environ))


def running(data_dir: Path | None) -> RunState:
    """What runs there. Raises `NotRunning`."""
    from headrace_operations.supervisor.state import read

    return read(folder(data_dir))


def know_stack(data_dir: Path | None) -> None:
    """Have the token of what runs there, if anything does, used for its addresses."""
    from headrace_operations.errors import NotRunning

    with contextlib.suppress(NotRunning):
        running(data_dir)


def service_names() -> list[str]:
    """To complete a word with."""
    from headrace_operations.supervisor.plan import installed

    return list(installed())


def topic_names() -> list[str]:
    """To complete a word with."""
    from headrace_schemas import EVENTS

    return sorted(EVENTS)


def console(*, stderr: bool = False) -> Console:
    """Return the console of `headrace_cli.terminal`, which is slow to import."""
    from headrace_cli import terminal

    return terminal.console(stderr=stderr)


def echo(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Write plain text; see `headrace_cli.terminal`."""
    from headrace_cli import terminal

    terminal.echo(text, end=end, error=error)


def echo_json(text: str) -> None:
    """Write JSON for programs; see `headrace_cli.terminal`."""
    from headrace_cli import terminal

    terminal.echo_json(text)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """The body says what is being done, how far it is, and how far it will go."""
    from headrace_cli.progress import ProgressDisplay

    with ProgressDisplay(what, console=console(stderr=True)) as progress:
        yield lambda doing, done, total: progress.at(done, total or None, doing)


def condition(service: ServiceState) -> str:
    """A service's state in words and colour."""
    from rich.markup import escape

    colour = {"ready": "green", "starting": "yellow", "unready": "yellow"}.get(service.status, "red")
    lacks = f" ({escape('lacks ' * (service.status == 'unready') + ', '.join(service.lacks))})" if service.lacks else ""
    return f"[{colour}]{service.status}[/]{lacks}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Any:
    """A plain table; columns whose name ends in `>` are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
