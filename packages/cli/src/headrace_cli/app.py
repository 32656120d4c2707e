"""The `headrace` command. A command imports its dependencies when it runs, so `--help` and completion stay fast."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from headrace_cli.commands import (
    config,
    connect,
    controls,
    dead_letters,
    demo,
    evaluate,
    feedback,
    lineage,
    logs,
    mirror,
    models,
    replay,
    rollouts,
    status,
    train,
    trinity,
    up,
)
from headrace_cli.commands.shared import Commands, echo

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Improve an agent from its own traffic.\n\n"
    "Start the services with [bold]headrace up[/], point your agent's OpenAI base_url at them, and send feedback.",
    epilog="Settings: [bold]headrace config reference[/]. Each command has examples in its own --help.",
)


def _print_version(chosen: bool) -> None:
    if chosen:
        from headrace import __version__

        echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


up.add_to(app)
demo.add_to(app)
status.add_to(app)
logs.add_to(app)
models.add_to(app)
lineage.add_to(app, models.app)
rollouts.add_to(app)
feedback.add_to(app)
replay.add_to(app)
train.add_to(app)
evaluate.add_to(app)
controls.add_to(app)
dead_letters.add_to(app)
mirror.add_to(app)
trinity.add_to(app)
config.add_to(app)
connect.add_to(app)


def main() -> None:
    """Run the `headrace` command; the console script calls this function."""
    if sys.platform == "win32":
        echo(
            "headrace: the command and the services run on Linux, on macOS and in WSL; "
            "on Windows itself, use the client (headrace-client)",
            error=True,
        )
        raise SystemExit(2)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # commands report an unreachable bus themselves
    app()
