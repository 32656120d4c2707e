"""`headrace trinity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Commands, command, console, table
from headrace_cli.commands.trinity_config import config

if TYPE_CHECKING:
    from headrace_cli.trinity_yaml.conversion import Conversion

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="For those who train with Trinity-RFT, or come from it.",
)


def convert(
    files: Annotated[
        list[Path], typer.Argument(help="explorer.yaml and trainer.yaml, or one for both.", metavar="FILE")
    ],
    out: Annotated[Path, typer.Option(help="The settings file to write; an existing one is not replaced.")] = Path(
        "headrace.toml"
    ),
) -> None:
    """Turn Trinity's YAML files into a settings file, and say of each key what became of it.

    A key without a meaning here is refused, and nothing is written: leave it out, once you know what depended on it.
    """
    from headrace.errors import UsageError
    from headrace_cli.trinity_yaml.conversion import convert as converted
    from headrace_cli.trinity_yaml.conversion import read, settings_file

    if out.exists():
        raise UsageError(f"{out} is there already; name another file with --out")
    found = converted(*map(read, files))
    _tell(found)
    if found.refused:
        raise UsageError(f"{len(found.refused)} keys have no meaning here:\n  " + "\n  ".join(found.refused))
    out.write_text(settings_file(found), encoding="utf-8")
    console().print(f"[bold]{out}[/] is written; start with [bold]headrace up --config {out}[/]")


def _tell(found: Conversion) -> None:
    from rich.markup import escape

    console().print(table(["key", "what became of it"], [(key, escape(said)) for key, said in found.lines]))


def add_to(parent: typer.Typer) -> None:
    command(
        app,
        config,
        "headrace trinity config",
        "headrace trinity config --config headrace.toml --out trainer.yaml",
    )
    command(
        app,
        convert,
        "headrace trinity convert explorer.yaml trainer.yaml",
        "headrace trinity convert gsm8k.yaml --out gsm8k.toml",
    )
    parent.add_typer(app, name="trinity")
