"""`headrace trinity` and `headrace trinity config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import Commands, Config, command, console, echo, table

if TYPE_CHECKING:
    from headrace_operations.trinity_yaml import Conversion


def config(
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="YAML file to write; an existing file is never replaced.")] = None,
) -> None:
    """Print the configuration of Trinity's trainer, made of the settings `[trainer]` and `[trainer.trinity]`.

    The trainer writes such a configuration for each of its jobs, with the name, the initial model and the database
    table of the job. This command writes it for a job with the name `JOB`, so that you can check all other values.
    Trinity itself checks the file in `trinity run`.
    """
    import os
    import subprocess
    import sys

    from headrace.errors import HeadraceError, UsageError
    from headrace_operations.supervisor.overrides import Overrides

    if out is not None and out.exists():
        raise UsageError(f"{out}: exists already; name another file with --out")
    command = [sys.executable, "-m", "headrace_trainer.trinity_yaml"]
    result = subprocess.run(
        command, env=Overrides(config, {}, os.environ).environ, capture_output=True, text=True, check=False
    )
    if result.returncode == 2:
        raise UsageError(result.stderr.strip())
    if result.returncode:
        raise HeadraceError(f"the trainer could not describe its settings: {result.stderr.strip()[-500:]}")
    if out is None:
        echo(result.stdout, end="")
    else:
        out.write_text(result.stdout, encoding="utf-8")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Work with Trinity-RFT: print its trainer configuration, convert its files.",
)


def convert(
    files: Annotated[
        list[Path], typer.Argument(help="explorer.yaml and trainer.yaml, or one file for both.", metavar="FILE")
    ],
    out: Annotated[Path, typer.Option(help="Settings file to write; an existing file is never replaced.")] = Path(
        "headrace.toml"
    ),
) -> None:
    """Convert Trinity's YAML files to a settings file, with an explanation for each key.

    If a key has no equivalent, nothing is written: remove the key once you know that nothing depends on it.
    """
    from headrace.errors import UsageError
    from headrace_operations.trinity_yaml import convert as convert_tables
    from headrace_operations.trinity_yaml import read, settings_file

    if out.exists():
        raise UsageError(f"{out}: exists already; name another file with --out")
    conversion = convert_tables(*map(read, files))
    _print_lines(conversion)
    if conversion.refused:
        keys = "\n  ".join(conversion.refused)
        raise UsageError(f"{len(conversion.refused)} keys have no equivalent:\n  {keys}")
    out.write_text(settings_file(conversion), encoding="utf-8")
    console().print(f"[bold]{out}[/] is written; start with [bold]headrace up --config {out}[/]")


def _print_lines(conversion: Conversion) -> None:
    from rich.markup import escape

    rows = [(key, escape(explanation)) for key, explanation in conversion.lines]
    console().print(table(["key", "conversion"], rows))


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
