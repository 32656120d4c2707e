"""`headrace trinity config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.shared import Config, echo


def config(
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="The YAML file to write; an existing one is not replaced.")] = None,
) -> None:
    """Print what Trinity's trainer is told: its YAML, from the settings of `[trainer]` and `[trainer.trinity]`.

    The trainer writes it anew for each job that it starts, with the job's name, model and table; this one shows the
    values. Trinity checks it by `trinity run` itself.
    """
    import os
    import subprocess
    import sys

    from headrace.errors import HeadraceError, UsageError
    from headrace_operations.supervisor.overrides import Overrides

    if out is not None and out.exists():
        raise UsageError(f"{out} is there already; name another file with --out")
    command = [sys.executable, "-m", "headrace_trainer.trinity_yaml"]
    done = subprocess.run(
        command, env=Overrides(config, {}, os.environ).environ, capture_output=True, text=True, check=False
    )
    if done.returncode == 2:
        raise UsageError(done.stderr.strip())
    if done.returncode:
        raise HeadraceError(f"the trainer could not tell its settings: {done.stderr.strip()[-500:]}")
    if out is None:
        echo(done.stdout, end="")
    else:
        out.write_text(done.stdout, encoding="utf-8")
