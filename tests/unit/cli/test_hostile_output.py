"""Every command prints text from outside without control characters.

Commands and their parameters are read from the application itself: a new command is tried without a change here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from headrace_cli.app import app
from tests.unit.cli.hostile_stack import HOSTILE, TOGETHER, VERSION, HostileServer, HostileStack, hidden, join_arguments
from tests.unit.cli.test_cli import headrace

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
    """Return every command of the application by its words."""
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
    import headrace_operations.dead_letters.actions
    import headrace_operations.from_topics
    import headrace_operations.lineage.sessions
    import headrace_operations.lineage.versions  # noqa: F401 (their `connected` is replaced, too)

    server = HostileServer()
    # Each service would be asked in a process of its own.
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", dict)
    monkeypatch.chdir(tmp_path)
    hostile_stack = HostileStack(tmp_path, server, monkeypatch)
    yield hostile_stack
    hostile_stack.close()
    server.stop()


def arguments(command: Any, stack: HostileStack, text: str | None) -> list[str]:
    """Return the required arguments of a command, or with `text` all that take a text, set to it."""
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
    """Return no flags, and `--json` where the command has it."""
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
    """The first test would also pass for a command without output."""
    stack.set_text("abc\u202edef")
    expected = {
        "status", "logs", "models show", "models audit", "models notes", "models collect",
        "rollouts list", "rollouts show", "replay events", "dead-letters list",
    }  # fmt: skip
    showing = {name: run(name, arguments(COMMANDS[name], stack, None), stack) for name in sorted(expected)}
    silent = {name for name in expected if "\\u202e" not in showing[name][1]}
    assert silent == set(), {name: showing[name] for name in silent}
