"""`headrace config`: list all settings, write a settings file, check one, print its JSON Schema."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Commands, command, console, echo, service_names, table
from headrace_cli.terminal import ProgressDisplay

if TYPE_CHECKING:
    from headrace.errors import UsageError
    from headrace_runtime.services import ServiceInfo


app = typer.Typer(cls=Commands, no_args_is_help=True, help="List all settings, write a settings file, check one.")


def check(file: Annotated[Path, typer.Argument(help="Settings file (TOML).")]) -> None:
    """Check a settings file as `headrace up` would, without starting a service. Exit status 1 on a problem.

    Each service checks its own part: the base folder and its chat template, reward functions and their arguments,
    rubrics, the gate program (with a simulated gateway), keys, the database, the bus and its topics. The ports of all
    services must be free.
    """
    from rich.markup import escape

    from headrace_operations.settings_reference import check_services
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import exclusion_reason, installed

    services = installed()
    overrides = Overrides(file, {}, os.environ)
    left_out = {name: reason for name, info in services.items() if (reason := exclusion_reason(name, info, overrides))}
    chosen = {name: info for name, info in services.items() if name not in left_out}
    bus = not any(info.is_bus for info in chosen.values())
    with ProgressDisplay("checking", len(chosen), unit="services", estimate=False) as progress:
        checks = check_services(chosen, overrides.environ, bus=bus, on_checked=progress.advance)
    problems = _merge_shared_problems({name: result.problems for name, result in checks.items()})
    problems |= {"ports": _port_problems(file, chosen)}
    notes = {name: "".join(f"\n{escape(note)}" for note in result.notes) for name, result in checks.items()}
    rows = [
        (name, "[red]" + escape("\n".join(sentences)) + "[/]" if sentences else f"[green]ok[/]{notes.get(name, '')}")
        for name, sentences in problems.items()
    ]
    rows += [(name, f"[dim]not started: {escape(reason)}[/]") for name, reason in left_out.items()]
    console().print(table(["service", "settings"], rows))
    if any(problems.values()):
        raise typer.Exit(1)


def _merge_shared_problems(problems: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the problems by service. A problem that several services report is listed once, under `all`."""
    by_sentence: dict[str, list[str]] = {}
    for name, sentences in problems.items():
        for sentence in sentences:
            by_sentence.setdefault(sentence, []).append(name)
    shared = [sentence for sentence, names in by_sentence.items() if len(names) > 1]
    unshared = {
        name: [sentence for sentence in sentences if sentence not in shared] for name, sentences in problems.items()
    }
    return ({"all": shared} if shared else {}) | unshared


def _port_problems(file: Path, services: dict[str, ServiceInfo]) -> list[str]:
    """Return the problems of the services' ports, or none if Headrace runs on this data directory and uses them."""
    from headrace.errors import UsageError
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of, make
    from headrace_operations.supervisor.state import NotRunning, read

    overrides = Overrides(file, {}, os.environ)
    try:
        read(data_dir_of(None, overrides))
    except NotRunning:
        try:
            make(None, overrides, services, only=services)
        except UsageError as error:
            return [str(error)]
    return []


def reference(
    service: Annotated[
        str | None, typer.Argument(help="Print only the settings of this service.", autocompletion=service_names)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    tier: Annotated[
        str | None, typer.Option(help="Print only this tier: common, tuning or limits.", metavar="TIER")
    ] = None,
) -> None:
    """Print every setting with its description and default, as a settings file in which all lines are comments.

    Each table lists the tiers in this order: common (what users set), tuning, limits.
    """
    from headrace.errors import UsageError
    from headrace_operations.settings_reference import TIERS, as_toml, describe_settings
    from headrace_operations.supervisor.plan import installed

    if tier not in (None, *TIERS):
        raise UsageError(f"--tier {tier}: must be one of {', '.join(TIERS)}")
    services = installed()
    if service is not None and service not in services:
        raise UsageError(f"service {service!r} is not installed; the installed services are {', '.join(services)}")
    _require_folder(output)
    with console(stderr=True).status("reading the settings of the services"):
        text = as_toml(
            describe_settings({service: services[service]} if service else services), only=service, tier=tier
        )
    _print_or_write(text, output)


def _require_folder(file: Path | None) -> None:
    """Raise `UsageError` if the folder of `file` does not exist, before its content is computed."""
    if file is not None and not file.parent.is_dir():
        raise _write_error(file, os.strerror(errno.ENOENT))


def _write_error(file: Path, reason: str | None) -> UsageError:
    from headrace.errors import UsageError

    return UsageError(f"{file}: cannot be written ({reason}); name a file in an existing folder")


def _exists_error(file: Path) -> UsageError:
    from headrace.errors import UsageError

    return UsageError(f"{file}: exists already; name another file, or remove it first")


def _print_or_write(text: str, output: Path | None) -> None:
    if output is None:
        echo(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _write_error(output, error.strerror) from None


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
) -> None:
    """Print the JSON Schema of the settings of all installed services, for completion and checks in an editor.

    Editors that use Taplo read it when the settings file begins with `#:schema ./headrace.schema.json`.
    """
    import json

    from headrace_operations.settings_reference import as_json_schema, describe_settings
    from headrace_operations.supervisor.plan import installed

    _require_folder(output)
    with console(stderr=True).status("reading the settings of the services"):
        text = json.dumps(as_json_schema(describe_settings(installed())), indent=1)
    _print_or_write(text + "\n", output)


def init(
    file: Annotated[Path, typer.Argument(help="File to create.")] = Path("headrace.toml"),
    base: Annotated[
        str, typer.Option(help="Base model: a folder, ORG/NAME of the hub, a GGUF file, or package:NAME/PATH.")
    ] = "models/base",
    model: Annotated[str, typer.Option(help="Model name that agents call.")] = "my-agent",
) -> None:
    """Write a settings file with the common settings, their descriptions and defaults. Never overwrites a file.

    For a base on this machine the file also sets the values that follow from its size: learning rate, tokens of a pass,
    and LoRA where all weights need more memory than a machine of 16 GB has for the trainer.
    """
    from headrace_operations.settings_reference import describe_settings, starter_file, suggest_values
    from headrace_operations.supervisor.plan import installed

    _require_folder(file)
    if file.exists():
        raise _exists_error(file)
    with console(stderr=True).status("reading the settings of the services"):
        services = installed()
        values = {"trainer.base": base, "trainer.model": model}
        trainer = {name: info for name, info in services.items() if name == "trainer"}
        text = starter_file(describe_settings(services), suggest_values(trainer, values, os.environ))
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise _exists_error(file) from None
    except OSError as error:
        raise _write_error(file, error.strerror) from None
    echo(f"{file} is written; check it with `headrace config check {file}`")


def add_to(parent: typer.Typer) -> None:
    command(app, init, "headrace config init", "headrace config init headrace.toml --base models/base --model my-agent")
    command(app, check, "headrace config check headrace.toml")
    command(
        app,
        reference,
        "headrace config reference",
        "headrace config reference gateway",
        "headrace config reference --tier common",
        "headrace config reference --output headrace.toml",
    )
    command(app, schema, "headrace config schema", "headrace config schema --output headrace.schema.json")
    parent.add_typer(app, name="config")
