"""Shared parts of the commands: options and groups of options, ranges of a topic, error handling, the console."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.topics import Range
    from headrace_operations.supervisor.state import RunState, ServiceState


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` with a signature for typer: each parameter that is a dataclass of options is replaced by one
    parameter for each field.
    """
    parameters_by_name = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in parameters_by_name.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    if not groups:
        return function

    @wraps(function)
    def wrapper(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in parameters_by_name.items():
        parameters += _options(groups[name]) if name in groups else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name]
        )
        for option in fields(group)
    ]


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", envvar="HEADRACE_DATA_DIR", help="Data directory.", metavar="DIR"),
]
InternalKey = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="HEADRACE_SECURITY__INTERNAL_KEY", help="Internal key, security.internal_key.", metavar="KEY"
    ),
]


def _settings_file(config: Path | None) -> Path | None:
    """Return the settings file from the option or the environment, or `headrace.toml` of this folder if it exists."""
    local_file = Path("headrace.toml")
    return config or (local_file if not os.environ.get("HEADRACE_CONFIG") and local_file.is_file() else None)


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="HEADRACE_CONFIG",
        help="Settings file (TOML); default: headrace.toml of this folder, if it exists.",
        metavar="FILE",
        callback=_settings_file,
    ),
]
BusAddress = Annotated[
    str | None, typer.Option("--bus", help="Address of the bus; default: the bus that runs here.", metavar="HOST:PORT")
]
Overridden = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override a setting; may be repeated.", metavar="SECTION.KEY=VALUE"),
]
Pythons = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        help="Run a service with the interpreter of another environment; may be repeated.",
        metavar="SERVICE=PATH",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class BusOptions:
    """Options that select the bus: by address, or that of the Headrace that runs here."""

    bus: BusAddress = None
    data_dir: DataDir = None

    @property
    def address(self) -> str:
        """Address of the bus. Raises `NotRunning` if none is named and none runs here."""
        if self.bus:
            load_stack_token(self.data_dir)
            return self.bus
        return running_state(self.data_dir).bus


class Commands(TyperGroup):
    """Group of commands that prints a `HeadraceError`, or an `OSError` about a file, instead of a traceback.

    The exit status is then 1, or 2 for wrong usage.
    """

    def invoke(self, ctx: Any) -> Any:
        from headrace.errors import HeadraceError, UsageError
        from headrace_operations.supervisor.state import StartFailed
        from headrace_runtime.errors import SettingError
        from headrace_schemas.values.text import printable

        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            echo(f"headrace: {error}", error=True)
            raise typer.Exit(2 if isinstance(error, UsageError | StartFailed | SettingError) else 1) from None
        except OSError as error:
            if error.filename is None:
                raise
            echo(f"headrace: {printable(str(error.filename))}: {error.strerror}; name another path", error=True)
            raise typer.Exit(1) from None


def command(app: typer.Typer, function: Callable[..., None], *examples: str, name: str | None = None) -> None:
    """Add `function` to `app` as a command; its docstring is the help text, and `examples` follow it."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    epilog = "\n\n".join(["[bold]Examples[/]", *examples])
    app.command(name, help=text, epilog=epilog)(expand_option_groups(function))


def folder(data_dir: Path | None, config: Path | None = None) -> Path:
    """Return the data directory from the option, the environment, the settings file, or the default, in this order."""
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of

    return data_dir_of(data_dir, Overrides(_settings_file(config), {}, os.environ))


def running_state(data_dir: Path | None) -> RunState:
    """Return the state of the Headrace that runs on `data_dir`. Raises `NotRunning`."""
    from headrace_operations.supervisor.state import read

    return read(folder(data_dir))


def load_stack_token(data_dir: Path | None) -> None:
    """Load the token of the Headrace that runs on `data_dir`, if any, for requests to its services."""
    from headrace_operations.supervisor.state import NotRunning

    with contextlib.suppress(NotRunning):
        running_state(data_dir)


def service_names() -> list[str]:
    """Return the names of all services, for completion in shells."""
    from headrace_operations.supervisor.plan import installed

    return list(installed())


def topic_names() -> list[str]:
    """Return the names of all topics, for completion in shells."""
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
def progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress display while the block runs.

    Yields:
        A function that takes the activity, the completed amount and the total amount.
    """
    from headrace_cli.terminal import ProgressDisplay

    with ProgressDisplay(title, console=console(stderr=True)) as progress:
        yield lambda activity, completed, total: progress.update(completed, total or None, activity)


def console_login(url: str, data_dir: Path) -> str:
    """Return the URL of the web console with a new one-time token, which logs a browser in."""
    from headrace_schemas.http.stack_access import make_login_token

    return f"{url}/login?token={make_login_token(data_dir)}"


def console_line(url: str, data_dir: Path, *, command: str = "headrace console") -> str:
    """Return the line that shows the address of the web console, on a terminal with a one-time token.

    Args:
        url: address of the console.
        data_dir: data directory of the stack.
        command: command that prints such an address.
    """
    if sys.stdout.isatty():  # other output may be kept in a log
        return f"console   [bold]{console_login(url, data_dir)}[/]   [dim]works once[/]"
    return f"console   {url}   `{command}` prints an address that logs you in"


def format_state(service: ServiceState) -> str:
    """Return the state of a service as coloured text."""
    from rich.markup import escape

    colour = {"ready": "green", "starting": "yellow", "unready": "yellow"}.get(service.status, "red")
    lacks = f" ({escape('lacks ' * (service.status == 'unready') + ', '.join(service.lacks))})" if service.lacks else ""
    return f"[{colour}]{service.status}[/]{lacks}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Any:
    """Return a rich table without frames. Columns whose name ends in `>` are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        result.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time, in UTC by default, or an age such as 2h.

    Raises:
        UsageError: the text is neither.
    """
    from headrace.errors import UsageError
    from headrace_schemas.values.text import printable

    if text is None:
        return None
    age = _AGE.fullmatch(text)
    try:
        if age:
            return datetime.now(UTC) - timedelta(seconds=float(age[1]) * _SECONDS[age[2]])
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):  # an age may be longer than the calendar
        raise UsageError(
            f"{printable(text)!r} is not a time; use the form 2026-01-31T12:00:00Z, or an age such as 90s, 5min, 2h, 7d"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


PANEL = "Records"


@dataclass(frozen=True)
class RangeOptions:
    """Options that select a range of a topic."""

    since: Annotated[
        str | None,
        typer.Option(help="Oldest record: ISO 8601, or an age such as 90s, 5min, 2h, 7d.", rich_help_panel=PANEL),
    ] = None
    until: Annotated[str | None, typer.Option(help="End time, exclusive.", rich_help_panel=PANEL)] = None
    from_offset: Annotated[
        int | None, typer.Option(min=0, help="First offset of each partition.", rich_help_panel=PANEL)
    ] = None
    to_offset: Annotated[
        int | None, typer.Option(min=0, help="End offset of each partition, exclusive.", rich_help_panel=PANEL)
    ] = None
    partition: Annotated[
        list[int] | None, typer.Option(help="Select this partition; may be repeated.", rich_help_panel=PANEL)
    ] = None
    session: Annotated[
        list[str] | None,
        typer.Option(help="Select this session; may be repeated.", metavar="ID", rich_help_panel=PANEL),
    ] = None
    tenant: Annotated[str, typer.Option(help="Tenant of the sessions.", rich_help_panel=PANEL)] = "default"

    def range_of(self, topic: str) -> Range:
        """Return the records of `topic` that the options select.

        Raises:
            UsageError: `since` or `until` is not a time.
        """
        from headrace.topics import Range
        from headrace_schemas.values.ids import session_key

        return Range(
            topic,
            partitions=tuple(self.partition or ()),
            from_offset=self.from_offset,
            to_offset=self.to_offset,
            since=parse_time(self.since),
            until=parse_time(self.until),
            keys=frozenset(session_key(self.tenant, session) for session in self.session or ()),
        )
