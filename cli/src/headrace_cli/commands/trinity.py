"""`headrace trinity`."""

from __future__ import annotations

import typer

from headrace_cli.commands.shared import Commands, command
from headrace_cli.commands.trinity_config import config

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="For those who train with Trinity-RFT.",
)


def add_to(parent: typer.Typer) -> None:
    command(
        app,
        config,
        "headrace trinity config",
        "headrace trinity config --config headrace.toml --out trainer.yaml",
    )
    parent.add_typer(app, name="trinity")
