"""`headrace config`: every setting there is, and whether a file is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.shared import Commands, command, console, table


def _services() -> list[str]:
    from headrace.supervisor.plan import installed

    return list(installed())


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Every setting there is, and whether a file is right.")


def check(file: Annotated[Path, typer.Argument(help="A settings file (TOML).", exists=True, dir_okay=False)]) -> None:
    """Let each service that `up` would start read the file; exit status 1 when one of them refuses it."""
    import os

    from headrace.settings_reference import refusals
    from headrace.supervisor.overrides import Overrides
    from headrace.supervisor.plan import installed, why_not

    services = installed()
    overrides = Overrides(file, {}, os.environ)
    left_out = {name: reason for name in services if (reason := why_not(name, overrides))}
    with console().status("asking the services"):
        found = refusals({name: module for name, module in services.items() if name not in left_out}, file)
    rows = [(name, f"[red]{text}[/]" if text else "[green]ok[/]") for name, text in found.items()]
    rows += [(name, f"[dim]not started: {reason}[/]") for name, reason in left_out.items()]
    console().print(table(["service", "settings"], rows))
    if any(found.values()):
        raise typer.Exit(1)


def reference(
    service: Annotated[
        str | None, typer.Argument(help="Only this service's section.", autocompletion=_services)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
) -> None:
    """Print every setting with its meaning and default, as a settings file in which everything is commented out."""
    from headrace.errors import UsageError
    from headrace.settings_reference import as_toml, ask
    from headrace.supervisor.plan import installed

    services = installed()
    if service is not None and service not in services:
        raise UsageError(f"no service {service!r} is installed; there are {', '.join(services)}")
    with console(stderr=True).status("asking the services"):
        text = as_toml(ask({service: services[service]} if service else services), only=service)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)


def add_to(parent: typer.Typer) -> None:
    command(app, check, "headrace config check headrace.toml")
    command(
        app,
        reference,
        "headrace config reference",
        "headrace config reference gateway",
        "headrace config reference --output headrace.toml",
    )
    parent.add_typer(app, name="config")
