"""`headrace models pull, push`: base models from a model hub, and versions to it."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace_cli.commands.model_catalog import write_version
from headrace_cli.commands.model_options import RegistryOptions
from headrace_cli.commands.shared import Config, DataDir, command, console, folder

Hub = Annotated[str, typer.Argument(help="Model of the hub: ORG/NAME, or ORG/NAME@REVISION.", metavar="ORG/NAME")]
HubTarget = Annotated[str, typer.Argument(help="Model of the hub, which is created if missing.", metavar="ORG/NAME")]


def pull(model: Hub, data_dir: DataDir = None, config: Config = None) -> None:
    """Fetch a base model from the hub into the data directory, for `trainer.base`.

    The trainer does the same at its first start. Later starts use the commit that was fetched, without a connection; a
    new `pull` of a branch fetches its newest commit. HF_ENDPOINT and HF_TOKEN are honoured.
    """
    from headrace.errors import UsageError
    from headrace_runtime.storage import base_models

    repository = base_models.Repository.parse(model)
    if repository is None:
        raise UsageError(f"{model}: must be ORG/NAME or ORG/NAME@REVISION")
    remote = base_models.describe(repository)
    console().print(f"{repository} has {len(remote.files)} files, {remote.size / 1e6:,.1f} MB")
    target = base_models.fetch(remote, folder(data_dir, config))
    console().print(f"{repository} at commit {remote.commit} is in [bold]{target}[/]")
    console().print(f'train it with [bold]trainer.base = "{repository.name}@{remote.commit}"[/]')


def push(
    version: Annotated[str, typer.Argument(help="Version, MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")],
    target: HubTarget,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Create a public model; default: a private one.")] = False,
    config: Config = None,
    *,
    registry: RegistryOptions,
) -> None:
    """Upload a version to the hub, as `export` would write it. Needs HF_TOKEN; HF_ENDPOINT is honoured.

    `headrace models pull` fetches the same bytes, and `import` restores the same version from them.
    """
    import tempfile
    from pathlib import Path

    from headrace_operations import catalog

    with tempfile.TemporaryDirectory(prefix="headrace-push-") as scratch:
        path = Path(scratch) / "version"
        state = write_version(version, path, registry, merge=merge, config=config)
        with console().status(f"uploading {state.id} to {target}"):
            commit = catalog.push(path, target, message=state.id, private=not public)
    console().print(f"{state.id} is [bold]{target}@{commit}[/]")


def add_to(app: typer.Typer) -> None:
    command(
        app,
        pull,
        "headrace models pull Qwen/Qwen3-0.6B",
        "headrace models pull Qwen/Qwen3-0.6B@main --data-dir .headrace",
    )
    command(
        app,
        push,
        "headrace models push email-agent@3f9c2d my-org/email-agent",
        "headrace models push email-agent:v1.0 my-org/email-agent --merge --public",
    )
