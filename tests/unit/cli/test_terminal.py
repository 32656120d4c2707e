"""Tests of the output of all commands: external text is escaped, progress is shown, and shared options are expanded.

Control, escape, bidirectional and invisible characters and markup are escaped. The commands and their parameters are
read from the application, so a new command is tested without a change here. Options are declared once for several
commands.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from typer.testing import CliRunner

from headrace_cli import terminal
from headrace_cli.app import app
from headrace_cli.commands.shared import expand_option_groups, table
from headrace_cli.terminal import ProgressDisplay
from headrace_operations import charts
from headrace_runtime.errors import HeadraceError
from headrace_schemas.values.text import printable
from tests.support.processes import wait_until
from tests.unit.cli.doubles import (
    HOSTILE,
    TOGETHER,
    VERSION,
    HostileServer,
    HostileStack,
    HttpFake,
    hidden,
    join_arguments,
)
from tests.unit.cli.test_cli import headrace

ROOT = Path(__file__).parents[3]


# What writes to the terminal.
def test_only_the_terminal_module_writes_output() -> None:
    folders = ("packages/cli/src/headrace_cli/", "packages/operations/src/headrace_operations/")
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    programs = {"evaluation/runner.py", "jobs/playing.py"}  # their standard output is read by a program
    writers = set()
    for path in listed.split():
        name = path.removeprefix(folders[0]).removeprefix(folders[1])
        if not path.endswith(".py") or name == "terminal.py" or name in programs:
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                *("print", "typer.echo", "typer.secho", "click.echo", "click.secho", "Console", "rich.print"),
                *("sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write"),
            }:
                writers.add(f"{name}:{node.lineno}")
    assert writers == set()


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def console(request: pytest.FixtureRequest) -> terminal.CleanConsole:
    return terminal.CleanConsole(
        file=io.StringIO(), force_terminal=request.param, width=120, highlight=False, color_system=None
    )


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("markup", [True, False])
def test_console_cleans_every_kind_of_output(console: terminal.CleanConsole, text: str, markup: bool) -> None:
    console.print(text, markup=markup)
    console.print(f"[bold]{text}[/] and [green]more[/]", markup=markup)
    console.print(table(["column", "number>"], [(text, "1"), (f"[red]{text}[/]", "2")], title=text))
    console.print(Panel(text))
    console.print("plain", style="red")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert not hidden(written)
    assert "evil.example" not in written or "[link=https://evil.example]" in written
    assert "plain" in written


@pytest.mark.parametrize("text", [*HOSTILE, "probe refused [0.5]", "[]", "[A] [b [c]]", "\\[red]a[/]", "a\\"])
def test_console_without_markup_adds_no_character(console: terminal.CleanConsole, text: str) -> None:
    console.print(text, markup=False)
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written == printable(text) + "\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_progress_is_clean(text: str) -> None:
    stream = io.StringIO()
    console = terminal.CleanConsole(file=stream, width=200, color_system=None)
    with ProgressDisplay("work", 2, activity=printable(text), console=console) as progress:
        progress.advance(1, text)
        progress.print_line(text)
        progress.print_line(progress.line)
    with Progress(TextColumn("{task.fields[activity]}", markup=False), console=console) as bar:
        bar.update(bar.add_task("x", activity=text), completed=1)
    assert not hidden(stream.getvalue())


@pytest.mark.parametrize("text", HOSTILE)
def test_plain_output_and_errors_are_clean(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.echo(text)
    terminal.echo(f"headrace: {HeadraceError(text)}", error=True)
    captured = capsys.readouterr()
    assert not hidden(captured.out + captured.err)


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 é 中 🙂"])
def test_json_output_is_ascii_and_holds_the_same_values(text: str) -> None:
    for encoded in (json.dumps([text, {text: text}], ensure_ascii=False), json.dumps([text, {text: text}], indent=1)):
        output = terminal.ascii_json(encoded)
        assert output.isascii()
        assert not hidden(output)
        assert json.loads(output) == json.loads(encoded)


@pytest.mark.parametrize("text", HOSTILE)
def test_pictures_are_drawn_without_formulas_and_hidden_characters(text: str, tmp_path: Path) -> None:
    plt = charts.pyplot()
    figure, axes = plt.subplots()
    axes.plot([1, 2], label=text.replace("\x00", ""))
    axes.set_title(text)
    axes.set_xlabel("$\\frac{")
    axes.legend()
    charts.save(figure, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


# Commands over services whose every text is hostile.
@pytest.fixture
def http() -> Iterator[HttpFake]:
    fake = HttpFake()
    yield fake
    fake.stop()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("form", [str, lambda text: json.dumps({"event": text, "level": text, text: text})])
def test_logs_are_escaped(form: Callable[[str], str], text: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_bytes(form(text).encode("utf-8", "replace") + b"\n\xff\xfe\n")
    for flags in ([], ["--raw"]):
        status, output = headrace("logs", *flags, data_dir=tmp_path)
        assert status == 0
        assert not hidden(output)
        assert "evil" not in output or "[link" in output


@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_of_a_service_is_printed_clean(http: HttpFake, text: str, tmp_path: Path) -> None:
    http.answer("GET", "/v1/models", {"error": {"message": text, "code": text, "type": text}}, status=400)
    status, output = headrace("models", "list", "--registry", http.url, data_dir=tmp_path)
    assert status == 1
    assert not hidden(output)


STARTING = {
    "up", "demo", "train", "evaluate", "controls", "mirror", "replay run", "replay resume", "replay offer",
    "replay plan", "replay remove", "models register", "models import", "models export", "rollouts watch",
    "models diff", "models pull", "models push",
}  # fmt: skip
"""Commands that start services, write a bus or wait for people: only wrong arguments are tested."""
SLOW = {"rollouts report", "trinity config"}
"""Commands that draw a chart or start a trainer process: only wrong arguments are tested."""
FOLLOWING = {"rollouts watch"}
"""Commands that run until a rollout ends."""
ADDRESS_PARAMETERS = {"data_dir", "key", "registry", "bus", "help"}
"""Parameters with the addresses of the hostile stack."""
WORDS = {"name": "m", "version": VERSION, "before": VERSION, "after": VERSION, "rollout": "m", "topic": "turns"}
"""Arguments that name existing objects of the hostile stack."""


def commands() -> dict[str, Any]:
    """Return every command of the application by its name, such as `models list`."""
    leaves: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            leaves[" ".join(words)] = command
            return
        for name, subcommand in inner.items():
            walk(subcommand, (*words, name))

    walk(typer.main.get_command(app), ())
    return leaves


COMMANDS = commands()


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileStack]:
    for name in ("dead_letters", "from_topics", "lineage.sessions", "lineage.versions"):
        import_module(f"headrace_operations.{name}")  # their `connected` is replaced, too
    server = HostileServer()
    # Each service would be asked in a process of its own.
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", dict)
    monkeypatch.chdir(tmp_path)
    hostile_stack = HostileStack(tmp_path, server, monkeypatch)
    yield hostile_stack
    hostile_stack.close()
    server.stop()


def arguments(command: Any, stack: HostileStack, text: str | None) -> list[str]:
    """Return the required arguments of `command`. With `text`, set all arguments that accept a text to it."""
    options: list[str] = []
    positional: list[str] = []
    for parameter in command.params:
        if not (parameter.required or text is not None) or getattr(parameter, "is_flag", False):
            continue
        kind = repr(getattr(parameter, "type_descriptor", SimpleNamespace(annotation=None)).annotation)
        is_path = "Path" in kind
        if not (is_path or "str" in kind) or "Literal" in kind or parameter.name in ADDRESS_PARAMETERS:
            continue
        name = str(parameter.name)
        value = text or WORDS.get(name) or (str(stack.file) if is_path else "a" * 12)
        (positional if parameter.param_type_name == "argument" else options).append(value)
        if parameter.param_type_name != "argument":
            options.insert(len(options) - 1, parameter.opts[0])
    return [*options, *(["--"] if positional else []), *positional]


def flags(command: Any) -> list[list[str]]:
    """Return the flag lists to test: no flag, and `--json` if `command` has this option."""
    return [[], ["--json"]] if any("--json" in parameter.opts for parameter in command.params) else [[]]


def run(name: str, values: list[str], stack: HostileStack) -> tuple[int, str]:
    status, output = headrace(*name.split(), *values, data_dir=stack.folder)
    assert not hidden(output), f"{name} {join_arguments(values)}: {hidden(output)[:5]!r}"
    assert "Traceback" not in output
    return status, output


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in STARTING | SLOW])
def test_a_command_escapes_data_it_reads(name: str, stack: HostileStack) -> None:
    command = COMMANDS[name]
    for text in (TOGETHER, HOSTILE[5]):
        stack.set_text(text)
        for more in flags(command) if text == TOGETHER else [[]]:
            status, output = run(name, [*more, *arguments(command, stack, None)], stack)
            if more and status == 0 and output.strip():
                assert output.isascii()
                for line in [output] if output.lstrip().startswith(("{\n", "[\n")) else output.splitlines():
                    json.loads(line)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in FOLLOWING])
def test_a_command_escapes_its_arguments(name: str, stack: HostileStack) -> None:
    stack.set_text(TOGETHER)
    status, output = run(name, arguments(COMMANDS[name], stack, TOGETHER), stack)
    assert status in (0, 1, 2), output
    assert status != 0 or name not in STARTING, f"{name} began its work: {output}"


def test_commands_that_only_read_print_their_data(stack: HostileStack) -> None:
    """Commands without output would pass the test above, so this test requires output."""
    stack.set_text("abc\u202edef")
    expected = {
        "status", "logs", "models show", "models audit", "models notes", "models collect",
        "rollouts list", "rollouts show", "replay events", "dead-letters list",
    }  # fmt: skip
    showing = {name: run(name, arguments(COMMANDS[name], stack, None), stack) for name in sorted(expected)}
    silent = {name for name in expected if "\\u202e" not in showing[name][1]}
    assert silent == set(), {name: showing[name] for name in silent}


def test_a_line_has_the_position_and_the_remaining_time() -> None:
    with ProgressDisplay("simulate", 1000, unit="seeds", log=lambda line: None) as progress:
        progress.advance(250, activity="0 failed")
        progress._started_s -= 10
        assert progress.line == "simulate: 250 of 1,000 seeds, 0 failed, 10 s, about 30 s left"


def test_unknown_values_are_left_out_of_the_line() -> None:
    with ProgressDisplay("demo", activity="starting", log=lambda line: None) as progress:
        assert progress.line == "demo: starting, 0 s"
        progress.update(3)
        assert progress.line == "demo: 3, starting, 0 s"
    with ProgressDisplay("work", 60, unit="s at most", estimate=False, log=lambda line: None) as progress:
        progress.update(20)
        assert progress.line == "work: 20 of 60 s at most, 0 s"


def test_a_log_has_a_line_at_each_interval_also_without_progress() -> None:
    lines: list[str] = []
    with ProgressDisplay("attack", 3, unit="attacks", log=lines.append, interval_s=0.01) as progress:
        progress.update(activity="silent_connections")
        wait_until(lambda: len(lines) > 2, 20, "three lines")
        progress.print_line("one of them is broken")
    assert lines.count("one of them is broken") == 1
    assert {line for line in lines if line.startswith("attack")} <= {
        f"attack: 0 of 3 attacks, {activity}0 s" for activity in ("", "silent_connections, ")
    }
    ended = len(lines)
    assert progress._log_thread is not None
    assert not progress._log_thread.is_alive(), "no line comes after the end"
    assert len(lines) == ended


def test_a_terminal_has_a_bar_and_lines_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with ProgressDisplay("mutants", 4, unit="mutants", console=console) as progress:
        progress.advance(activity="1 live")
        progress.print_line("survived: [bold]a[1][/]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "survived: [bold]a[1][/]" in text
    assert re.search(r"mutants .*1/4 mutants .*1 live", text)
    assert progress._log_thread is None


@dataclass(frozen=True)
class Where:
    place: Annotated[str, typer.Option("--at", help="Where.")] = "here"


@dataclass(frozen=True)
class Exactly(Where):
    times: Annotated[list[int] | None, typer.Option(min=1)] = None


def show(name: Annotated[str, typer.Argument()], *, where: Exactly, loud: bool = False) -> None:
    """Print the arguments."""
    typer.echo(f"{name} {where} {loud}")


def plain(name: str) -> None:
    typer.echo(name)


def test_a_group_is_given_by_its_options() -> None:
    app = typer.Typer()
    app.command()(expand_option_groups(show))
    run = CliRunner().invoke
    assert run(app, ["x"]).output == "x Exactly(place='here', times=None) False\n"
    result = run(app, ["x", "--at", "there", "--times", "1", "--times", "2", "--loud"])
    assert result.output == "x Exactly(place='there', times=[1, 2]) True\n"
    assert run(app, ["x", "--times", "0"]).exit_code == 2
    assert "Where." in run(app, ["--help"]).output


def test_a_function_without_a_group_stays_as_it_is() -> None:
    assert expand_option_groups(plain) is plain
