"""The `headrace` command. A command imports its dependencies when it runs, so `--help` and completion stay fast."""

from __future__ import annotations

import logging

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
from headrace_cli.commands.shared import Commands

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
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # commands report an unreachable bus themselves
    app()
