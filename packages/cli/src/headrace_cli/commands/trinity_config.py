"""`headrace trinity config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.shared import Config, echo


def config(
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="YAML file to write; an existing file is never replaced.")] = None,
) -> None:
    """Print the configuration of Trinity's trainer, made of the settings `[trainer]` and `[trainer.trinity]`.

    The trainer writes it for each job with the job's name, model and table; this command shows the values. Trinity
    itself checks the file in `trinity run`.
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
