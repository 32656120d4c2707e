"""`headrace config`: lists all settings, and checks a settings file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Commands, command, console, echo, service_names, table

if TYPE_CHECKING:
    from headrace_runtime.services import ServiceInfo


app = typer.Typer(cls=Commands, no_args_is_help=True, help="List all settings, write a first file, and check one.")


def check(file: Annotated[Path, typer.Argument(help="A settings file (TOML).")]) -> None:
    """Try all that `headrace up` would, without starting anything; exit status 1 when something is wrong.

    Each service reads the file and tries what is its own: the base folder and its chat template, reward functions and
    their arguments, rubrics, the gate's program (against a stand-in gateway), keys, the database,
    the bus and its topics, and whether the ports are free.
    """
    import os

    from rich.markup import escape

    from headrace_operations.settings_reference import refusals
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import installed, why_not

    services = installed()
    overrides = Overrides(file, {}, os.environ)
    left_out = {name: reason for name, info in services.items() if (reason := why_not(name, info, overrides))}
    chosen = {name: info for name, info in services.items() if name not in left_out}
    with console().status("asking the services"):
        found = refusals(chosen, overrides.environ, bus=not any(info.is_bus for info in chosen.values()))
    found = _shared_once(found) | {"ports": _ports(file, chosen)}
    rows = [
        (name, "[red]" + escape("\n".join(wrong)) + "[/]" if wrong else "[green]ok[/]") for name, wrong in found.items()
    ]
    rows += [(name, f"[dim]not started: {escape(reason)}[/]") for name, reason in left_out.items()]
    console().print(table(["service", "settings"], rows))
    if any(found.values()):
        raise typer.Exit(1)


def _shared_once(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """What several say stands with all of them in one row, not once for each."""
    by_sentence: dict[str, list[str]] = {}
    for name, wrong in found.items():
        for sentence in wrong:
            by_sentence.setdefault(sentence, []).append(name)
    shared = [sentence for sentence, names in by_sentence.items() if len(names) > 1]
    own = {name: [one for one in wrong if one not in shared] for name, wrong in found.items()}
    return ({"all": shared} if shared else {}) | own


def _ports(file: Path, services: dict[str, ServiceInfo]) -> list[str]:
    """What keeps `up` from its ports; nothing when it is up already on this data directory, and so has them."""
    import os

    from headrace.errors import UsageError
    from headrace_operations.errors import NotRunning
    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of, make
    from headrace_operations.supervisor.state import read

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
        str | None, typer.Argument(help="Only this service's section.", autocompletion=service_names)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
    tier: Annotated[str | None, typer.Option(help="Only these: common, tuning or limits.", metavar="TIER")] = None,
) -> None:
    """Print every setting with its meaning and default, as a settings file in which everything is commented out.

    In each table come first those that users set (common), then what tunes, then what limits.
    """
    from headrace.errors import UsageError
    from headrace_operations.settings_reference import TIERS, as_toml, ask
    from headrace_operations.supervisor.plan import installed

    if tier not in (None, *TIERS):
        raise UsageError(f"no tier {tier!r}; there are {', '.join(TIERS)}")
    services = installed()
    if service is not None and service not in services:
        raise UsageError(f"no service {service!r} is installed; there are {', '.join(services)}")
    with console(stderr=True).status("asking the services"):
        text = as_toml(ask({service: services[service]} if service else services), only=service, tier=tier)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    else:
        echo(text, end="")


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("headrace.toml"),
    base: Annotated[str, typer.Option(help="The Hugging Face folder to start from.")] = "models/base",
    model: Annotated[str, typer.Option(help="The name that agents ask for.")] = "my-agent",
) -> None:
    """Write a settings file to begin with: what users set, with meanings and defaults. No file is overwritten."""
    from headrace.errors import UsageError
    from headrace_operations.settings_reference import ask, to_begin_with
    from headrace_operations.supervisor.plan import installed

    with console(stderr=True).status("asking the services"):
        text = to_begin_with(ask(installed()), {"trainer.base": base, "trainer.model": model})
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise UsageError(f"{file} exists; name another file, or remove it first") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    echo(f"{file} is written; `headrace config check {file}` says whether it can start")


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
    parent.add_typer(app, name="config")
