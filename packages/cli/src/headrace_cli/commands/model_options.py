"""What commands about models share: which registry, which model, which version, who asks and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import DataDir, InternalKey, know_stack, running

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas.registry_api import VersionState


@dataclass(frozen=True)
class RegistryOptions:
    """Which registry is asked: one that is named, or that of what runs here."""

    data_dir: DataDir = None
    registry: Annotated[
        str | None,
        typer.Option("--registry", help="URL of the registry, when it was not started by `up`.", metavar="URL"),
    ] = None
    key: InternalKey = None
    who: Annotated[
        str | None,
        typer.Option("--who", envvar="HEADRACE_WHO", help="Who asks, for the audit log; default: the user here."),
    ] = None

    def open(self) -> ModelRegistry:
        """Raises `NotRunning`."""
        from headrace.registry import ModelRegistry
        from headrace_operations.errors import NotRunning

        url = self.registry
        if url is not None:
            know_stack(self.data_dir)
        else:
            service = running(self.data_dir).services.get("registry")
            if service is None:
                raise NotRunning("no registry was started here; name one with --registry URL")
            url = service.url
        return ModelRegistry(url, key=self.key, who=self.who or _user())


def _user() -> str:
    import getpass
    import socket

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return ""


def _models() -> list[str]:
    from headrace.errors import HeadraceError

    try:
        with RegistryOptions().open() as registry:
            return [model.id for model in registry.models()]
    except HeadraceError:
        return []


Name = Annotated[str, typer.Argument(help="The model's name.", metavar="MODEL", autocompletion=_models)]
VersionName = Annotated[
    str, typer.Argument(help="MODEL@DIGEST, the digest's first letters, a label or an alias.", metavar="VERSION")
]
Reason = Annotated[str, typer.Option(help="Kept with the decision.")]
Why = Annotated[str, typer.Option("--why", help="Kept in the audit log.")]


def full_name(api: ModelRegistry, name: str, version: str) -> str:
    """The one version that is meant by a label, an alias or a digest's first letters. Raises `UsageError`."""
    return find(api, name, version).id


def find(api: ModelRegistry, name: str, version: str) -> VersionState:
    """The same with all that is known of it."""
    from headrace.errors import UsageError

    known = api.versions(name, limit=1000)
    named = api.model(name).aliases.get(version)
    exact = [one for one in known if version == one.label or named == one.id]
    wanted = version if version.startswith(f"{name}@") else f"{name}@{version}"
    found = exact or [one for one in known if one.id.startswith(wanted)]
    if len(found) != 1:
        raise UsageError(
            f"{version}: {len(found)} versions of {name} begin like this; see `headrace models show {name}`"
        )
    return found[0]


def parted(version: str) -> tuple[str, str]:
    """Model and the rest of MODEL@DIGEST or MODEL:LABEL. Raises `UsageError`."""
    from headrace.errors import UsageError

    for sign in "@:":
        model, found, rest = version.partition(sign)
        if model and found and rest:
            return model, rest
    raise UsageError(f"{version}: write MODEL@DIGEST, or MODEL:LABEL")
