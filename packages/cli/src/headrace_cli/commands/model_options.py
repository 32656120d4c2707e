"""Options of commands about models: registry, model, version, author and reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import DataDir, InternalKey, load_stack_token, running_state

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas.http.registry_api import VersionState


@dataclass(frozen=True)
class RegistryOptions:
    """Options that select the registry: by URL, or that of the Headrace that runs here."""

    data_dir: DataDir = None
    registry: Annotated[
        str | None,
        typer.Option("--registry", help="URL of the registry; default: the registry that runs here.", metavar="URL"),
    ] = None
    key: InternalKey = None
    who: Annotated[
        str | None,
        typer.Option(
            "--who", envvar="HEADRACE_WHO", help="Author for the audit log; default: the user of this machine."
        ),
    ] = None

    def open(self) -> ModelRegistry:
        """Open a client of the registry.

        Raises:
            NotRunning: no registry is named and none runs here.
        """
        from headrace.registry import ModelRegistry
        from headrace_operations.supervisor.state import NotRunning

        url = self.registry
        if url is not None:
            load_stack_token(self.data_dir)
        else:
            service = running_state(self.data_dir).services.get("registry")
            if service is None:
                raise NotRunning("no registry runs here; name one with --registry URL")
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


Name = Annotated[str, typer.Argument(help="Name of the model.", metavar="MODEL", autocompletion=_models)]
VersionName = Annotated[
    str,
    typer.Argument(
        help="Version: MODEL@DIGEST, the first characters of the digest, a label or an alias.", metavar="VERSION"
    ),
]
Reason = Annotated[str, typer.Option(help="Reason, which is stored with the decision.")]
Why = Annotated[str, typer.Option("--why", help="Reason for the audit log.")]


def full_name(api: ModelRegistry, name: str, version: str) -> str:
    """Return the version id that a label, an alias or the beginning of a digest names.

    Raises:
        UsageError: no version or several versions match.
    """
    return find(api, name, version).id


def find(api: ModelRegistry, name: str, version: str) -> VersionState:
    """Return the state of the version that a label, an alias or the beginning of a digest names.

    Raises as `full_name`.
    """
    from headrace.errors import UsageError

    versions = api.versions(name, limit=1000)
    aliased = api.model(name).aliases.get(version)
    exact = [candidate for candidate in versions if version == candidate.label or aliased == candidate.id]
    prefix = version if version.startswith(f"{name}@") else f"{name}@{version}"
    matches = exact or [candidate for candidate in versions if candidate.id.startswith(prefix)]
    if len(matches) != 1:
        raise UsageError(f"{version}: matches {len(matches)} versions of {name}; see `headrace models show {name}`")
    return matches[0]


def split_version(version: str) -> tuple[str, str]:
    """Split MODEL@DIGEST or MODEL:LABEL at the separator.

    Raises:
        UsageError: the name has another form.
    """
    from headrace.errors import UsageError

    for separator in "@:":
        model, present, rest = version.partition(separator)
        if model and present and rest:
            return model, rest
    raise UsageError(f"{version}: must be MODEL@DIGEST or MODEL:LABEL")
