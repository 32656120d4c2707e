"""Nothing that came from outside reaches a terminal raw: control, escape, bidi and invisible characters, markup."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.panel import Panel
from rich.progress import Progress, TextColumn

from headrace_cli import drawing, terminal
from headrace_cli.commands.shared import table
from headrace_cli.progress import ProgressDisplay
from headrace_runtime.errors import HeadraceError
from headrace_schemas.catalog import AuditList, GarbageReport, NoteList
from headrace_schemas.registry_api import ModelList, ModelState, VersionList
from headrace_schemas.rollout_api import RolloutList, RolloutState
from headrace_schemas.text import printable
from tests.unit.cli.http_fake import HttpFake
from tests.unit.cli.test_cli import headrace

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "a\x1b[2J\x1b]0;title\x07b",
    "a\x9b31m\x90\x9cb\x7f",
    "a\u202eb\u2066c\u2069\u200f\u061cd",
    "a\u200b\u2060\ufeffb\u2028c\u2029\u00add",
    "a\x00\x08\x0b\x0c\rb",
    "[/] [/red] [link=https://evil.example]a[/link] [@click=x]b[/] [bold",
    "\\[red]\\\\[/] \U000e0041\u3164 {x} %s $\\frac",
]
VERSION = "m@" + "a" * 12


def hidden(text: str) -> list[str]:
    """Return the characters of `text` that a terminal would obey or not show."""
    return [character for character in text if character not in "\n\t" and printable(character) != character]


# What writes to the terminal.


def test_only_the_terminal_module_writes_output() -> None:
    listed = subprocess.run(["git", "ls-files", "cli/src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    programs = {"evaluation/gate_program.py", "jobs/playing.py"}  # their standard output is read by a program
    writers = set()
    for path in listed.split():
        name = path.removeprefix("cli/src/headrace_cli/")
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
    with ProgressDisplay("work", 2, doing=printable(text), console=console) as progress:
        progress.advance(1, text)
        progress.say(text)
        progress.say(progress.line)
    with Progress(TextColumn("{task.fields[doing]}", markup=False), console=console) as bar:
        bar.update(bar.add_task("x", doing=text), completed=1)
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
        shown = terminal.ascii_json(encoded)
        assert shown.isascii()
        assert not hidden(shown)
        assert json.loads(shown) == json.loads(encoded)


@pytest.mark.parametrize("text", HOSTILE)
def test_pictures_are_drawn_without_formulas_and_hidden_characters(text: str, tmp_path: Path) -> None:
    plt = drawing.pyplot()
    figure, axes = plt.subplots()
    axes.plot([1, 2], label=text.replace("\x00", ""))
    axes.set_title(text)
    axes.set_xlabel("$\\frac{")
    axes.legend()
    drawing.save(figure, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


# Commands over services whose every text is hostile.


@pytest.fixture
def http() -> Iterator[HttpFake]:
    fake = HttpFake()
    yield fake
    fake.stop()


class _Poison:
    """Makes JSON of a model with every field set, and one text in every field that takes any text."""

    def __init__(self, model: type[BaseModel], text: str) -> None:
        self._schema = model.model_json_schema(mode="serialization")
        self._text = text

    def made(self) -> Any:
        return self._value(self._schema)

    def _value(self, part: dict[str, Any]) -> Any:
        if "$ref" in part:
            return self._value(self._schema["$defs"][part["$ref"].rsplit("/", 1)[1]])
        for choice in ("anyOf", "oneOf", "allOf"):
            if choice in part:
                return self._value(part[choice][0])
        if "const" in part or "enum" in part:
            return part.get("const", part.get("enum", [None])[0])
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "object": self._object,
            "array": self._array,
            "boolean": self._true,
        }
        makers["integer"] = makers["number"] = self._number
        maker: Callable[[dict[str, Any]], Any] = makers.get(part.get("type", ""), self._string)
        return maker(part)

    def _number(self, part: dict[str, Any]) -> Any:
        return part.get("minimum", 1)

    def _true(self, _part: dict[str, Any]) -> bool:
        return True

    def _object(self, part: dict[str, Any]) -> Any:
        if "properties" in part:
            return {name: self._value(inner) for name, inner in part["properties"].items()}
        for inner in part.get("patternProperties", {}).values():
            return {"m": self._value(inner)}
        inner = part.get("additionalProperties")
        return {self._text: self._value(inner)} if isinstance(inner, dict) and "propertyNames" not in part else {}

    def _array(self, part: dict[str, Any]) -> Any:
        items = part.get("prefixItems") or [part.get("items", {})] * max(1, part.get("minItems", 1))
        return [self._value(item) for item in items]

    def _string(self, part: dict[str, Any]) -> str:
        if part.get("format") == "date-time":
            return "2026-01-01T00:00:00Z"
        if pattern := part.get("pattern"):
            return next(sample for sample in SAMPLES if re.search(pattern, sample))
        return self._text[: part.get("maxLength", 1000)]


SAMPLES = ("m", VERSION, "a" * 64, "1", "a" * 16, "00-" + "a" * 32 + "-" + "a" * 16 + "-01")


COMMANDS: dict[tuple[str, ...], dict[tuple[str, str], type[BaseModel]]] = {
    ("models", "list"): {("GET", "/v1/models"): ModelList},
    ("models", "show", "m"): {("GET", "/v1/models/m"): ModelState, ("GET", "/v1/models/m/versions"): VersionList},
    ("models", "audit"): {("GET", "/v1/audit"): AuditList},
    ("models", "notes", "m", VERSION): {
        ("GET", "/v1/models/m"): ModelState,
        ("GET", "/v1/models/m/versions"): VersionList,
        ("GET", "/v1/models/m/notes"): NoteList,
    },
    ("models", "collect"): {("POST", "/v1/garbage"): GarbageReport},
    ("rollouts", "list"): {("GET", "/v1/rollouts"): RolloutList},
    ("rollouts", "show", "m"): {
        ("GET", "/v1/rollouts"): RolloutList,
        ("GET", "/v1/rollouts/m"): RolloutState,
    },
}


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True], ids=["human", "json"])
def test_commands_print_nothing_raw(
    http: HttpFake, arguments: tuple[str, ...], as_json: bool, text: str, tmp_path: Path
) -> None:
    for (method, path), model in COMMANDS[arguments].items():
        http.answer(method, path, _Poison(model, text).made())
    flags = ["--json"] if as_json and arguments[1] != "notes" else []
    status, output = headrace(*arguments, *flags, "--registry", http.url, data_dir=tmp_path)
    assert not hidden(output)
    if flags and status == 0:
        assert output.isascii()
        json.loads(output)
    if "\x00" not in text and arguments != ("rollouts", "show", "m"):  # NUL is refused where it enters
        assert status == 0, output


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("form", [str, lambda text: json.dumps({"event": text, "level": text, text: text})])
def test_logs_print_nothing_raw(form: Callable[[str], str], text: str, tmp_path: Path) -> None:
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
