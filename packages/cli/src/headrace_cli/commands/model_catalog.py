"""`headrace models register, import, export, serve, unserve, alias, tag, note, notes, retire, collect, audit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.model_options import Name, RegistryOptions, VersionName, Why, find, full_name, split_version
from headrace_cli.commands.shared import AsJson, Config, command, console, echo_json, table

if TYPE_CHECKING:
    from headrace_schemas.http.registry_api import ModelState, VersionState
    from headrace_schemas.values.blobs import BlobRef

Folder = Annotated[
    Path, typer.Argument(help="Folder of a model in Hugging Face's layout or of a PEFT adapter.", metavar="FOLDER")
]
Label = Annotated[
    str | None, typer.Option("--version-label", help="Label of the version, such as v1.0.", metavar="LABEL")
]


@dataclass(frozen=True)
class FolderOptions:
    """Command line options of the commands that create a version from a folder."""

    version_label: Label = None
    base: Annotated[
        str | None,
        typer.Option("--base", help="Base version of an adapter.", metavar="MODEL@DIGEST"),
    ] = None
    serve: Annotated[bool, typer.Option("--serve", help="Let replicas load the version now.")] = False
    why: Why = ""
    config: Config = None


def register(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="Name of the model.", metavar="MODEL")],
    *,
    options: FolderOptions,
    registry: RegistryOptions,
) -> None:
    """Register a fixed version, for example an opponent, a teacher or a judge.

    The folder is loaded as a replica would load it, and its output is compared with that of transformers. Then its
    files are stored in the blob store. Turns of a fixed version are captured and never trained.
    """
    _register_folder(folder, name, options, registry)


def import_(
    folder: Folder,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model; default: that of the export.", metavar="MODEL")
    ] = None,
    *,
    options: FolderOptions,
    registry: RegistryOptions,
) -> None:
    """Import a folder: one that `export` wrote as the same version, any other folder as a new version.

    The files of an exported folder are checked against its manifest.
    """
    _register_folder(folder, name, options, registry)


def _register_folder(folder: Path, name: str | None, options: FolderOptions, registry: RegistryOptions) -> None:
    import asyncio

    from headrace_operations import catalog

    with registry.open() as api:
        base_manifest: BlobRef | None = None
        if options.base is not None:
            base_manifest = find(api, *split_version(options.base)).manifest
        with console().status(f"loading {folder} as a replica would"):
            stored = asyncio.run(
                catalog.store_folder(folder.absolute(), name, base_manifest, _environ(registry, options.config))
            )
        catalog.register(api, stored, label=options.version_label, serve=options.serve, why=options.why)
    model, label = stored.version.partition("@")[0], options.version_label
    console().print(f"[bold]{stored.version}[/] is registered" + (f" as {model}:{label}" if label else ""))
    if not options.serve:
        console().print(f"serve it with [bold]headrace models serve {model} {label or stored.version}[/]")


def export(
    version: Annotated[str, typer.Argument(help="Version, MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")],
    folder: Annotated[Path, typer.Argument(help="New folder.", metavar="FOLDER")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    config: Config = None,
    *,
    registry: RegistryOptions,
) -> None:
    """Export a version to a folder: full weights for transformers and vLLM, an adapter for PEFT and vLLM.

    `import` restores the same version from the folder's manifest. A merged export is a new model.
    """
    state = write_version(version, folder, registry, merge=merge, config=config)
    console().print(f"{state.id} is in [bold]{folder}[/]")
    if state.base and not merge:
        console().print(f"it is an adapter of {state.base}; export the base with `export` as well")


def write_version(
    version: str, folder: Path, registry: RegistryOptions, *, merge: bool, config: Path | None
) -> VersionState:
    """Write the files of a version to a new folder. With `merge`, merge an adapter into its base and write the full
    weights.

    Raises:
        UsageError: the folder is not empty, the version has no files, or there is nothing to merge.
    """
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations import catalog

    catalog.check_empty(folder)
    with registry.open() as api:
        state = find(api, *split_version(version))
        if state.manifest is None or state.collected:
            raise UsageError(f"{state.id}: its files were collected; register them again to restore the version")
        if merge and state.base is None:
            raise UsageError(f"{state.id}: has full weights already; omit --merge")
        if not merge or state.base is None:
            size_bytes = catalog.export(catalog.fetch_manifest(state.manifest), folder)
            console().print(f"{size_bytes / 1e6:,.1f} MB")
            return state
        base_manifest = find(api, *split_version(state.base)).manifest
        assert base_manifest is not None
        with console().status(f"merging {state.id} into {state.base}"):
            environ = _environ(registry, config)
            asyncio.run(catalog.merge_adapter(state.manifest, base_manifest, folder.absolute(), environ))
        return state


def serve(name: Name, version: VersionName, why: Why = "", *, registry: RegistryOptions) -> None:
    """Let replicas load and probe a version in addition to those that they serve.

    Clients call it as MODEL@DIGEST or MODEL:LABEL. The first served version of an untrained model becomes its champion.
    """
    from headrace_schemas.http.catalog import ServeRequest

    with registry.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/serve", _state(), ServeRequest(version=full, why=why))
    console().print(f"{full} will be served; follow it with [bold]headrace models show {name}[/]")


def unserve(name: Name, version: VersionName, why: Why = "", *, registry: RegistryOptions) -> None:
    """Stop serving a registered version, which `serve` has loaded into the replicas."""
    from headrace_schemas.http.catalog import ServeRequest

    with registry.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/unserve", _state(), ServeRequest(version=full, why=why))
    console().print(f"{full} is not served any more")


def alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Alias, such as stable.", metavar="ALIAS")],
    version: Annotated[
        str | None, typer.Argument(help="New version of the alias; omit it to remove the alias.")
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect", help="Present version of the alias, or `nothing`; default: read before.", metavar="VERSION"
        ),
    ] = None,
    why: Why = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Move an alias if it has the expected version, so that of two concurrent moves one fails.

    Clients call it as MODEL:ALIAS. The version of an alias is served and cannot be retired.
    """
    from headrace_schemas.http.catalog import AliasesRequest, AliasMove

    with registry.open() as api:
        if expect is None:
            expected = api.model(name).aliases.get(alias)
        else:
            expected = None if expect == "nothing" else full_name(api, name, expect)
        target = full_name(api, name, version) if version else None
        moves = {alias: AliasMove(version=target, expected=expected)}
        api.ask("POST", f"/v1/models/{name}/aliases", _state(), AliasesRequest(moves=moves, why=why))
    console().print(f"{name}:{alias} is [bold]{target or 'nothing'}[/]; before it was {expected or 'nothing'}")


def tag(
    name: Name,
    version: VersionName,
    add: Annotated[list[str] | None, typer.Option("--add", help="Tag to add; may be repeated.", metavar="TAG")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Tag to remove; may be repeated.", metavar="TAG")
    ] = None,
    why: Why = "",
    *,
    registry: RegistryOptions,
) -> None:
    """Add tags to a version or remove them."""
    from headrace_schemas.http.catalog import TagsRequest

    with registry.open() as api:
        full = full_name(api, name, version)
        request = TagsRequest(version=full, add=tuple(add or ()), remove=tuple(remove or ()), why=why)
        api.ask("POST", f"/v1/models/{name}/tags", _state(), request)
        tags = find(api, name, full).tags
    console().print(f"{full}: {' '.join(tags) or 'no tags'}")


def note(
    name: Name, version: VersionName, text: Annotated[str, typer.Argument(metavar="TEXT")], *, registry: RegistryOptions
) -> None:
    """Add a note to a version. Notes cannot be changed."""
    from headrace_schemas.http.catalog import NoteRequest

    with registry.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/notes", _state(), NoteRequest(version=full, text=text))
    console().print(f"the note is added to {full}")


def notes(name: Name, version: VersionName, *, registry: RegistryOptions) -> None:
    """List the notes of a version."""
    from headrace_schemas.http.catalog import NoteList

    with registry.open() as api:
        full = full_name(api, name, version)
        version_notes = api.ask("GET", f"/v1/models/{name}/notes?version={full}", NoteList).data
    rows = [(f"{entry.at:%Y-%m-%d %H:%M}", entry.who, entry.text) for entry in version_notes]
    console().print(table(["when", "who", "note"], rows, full))


def retire(name: Name, version: VersionName, why: Why = "", *, registry: RegistryOptions) -> None:
    """Retire a version for good. Refused if it is served or has a role, an alias or a pin."""
    from headrace_schemas.http.catalog import RetireRequest

    with registry.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/retire", _state(), RetireRequest(version=full, why=why))
    console().print(f"{full} is retired; [bold]headrace models collect[/] shows the size of its files")


def collect(
    really: Annotated[
        bool, typer.Option("--really", help="Remove the files; without this option nothing is removed.")
    ] = False,
    why: Why = "",
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Remove the files of retired versions without a role, alias, pin, adapter, lineage or rollout.

    Manifests are kept, so that a version can always be explained.
    """
    from headrace_schemas.http.catalog import GarbageReport, GarbageRequest

    with registry.open() as api:
        report = api.ask("POST", "/v1/garbage", GarbageReport, GarbageRequest(dry_run=not really, why=why))
    if json:
        echo_json(report.model_dump_json())
        return
    rows = [(entry.version, str(entry.files), f"{entry.size_bytes / 1e6:,.1f}", "") for entry in report.collected]
    rows += [(entry.version, "-", "-", "; ".join(entry.needed_by)) for entry in report.kept]
    console().print(table(["version", "files>", "MB>", "needed by"], rows))
    outcome = "would be removed; remove them with --really" if report.dry_run else "were removed"
    console().print(f"{report.size_bytes / 1e6:,.1f} MB {outcome}")


def audit(
    name: Annotated[str | None, typer.Argument(help="Show only this model.", metavar="MODEL")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of entries, newest first.")] = 50,
    before: Annotated[int | None, typer.Option(help="Show only entries with a smaller number.")] = None,
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """List changes with author, time and reason. `proved` is the owner of the key, `who` is the stated author."""
    from urllib.parse import urlencode

    from headrace_schemas.http.catalog import AuditList

    parameters = {"limit": limit, "model": name, "before": before}
    query = urlencode({key: value for key, value in parameters.items() if value is not None})
    with registry.open() as api:
        entries = api.ask("GET", f"/v1/audit?{query}", AuditList)
    if json:
        echo_json(entries.model_dump_json())
        return
    rows = [
        (
            str(entry.number),
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.principal,
            entry.who,
            entry.action,
            entry.version or entry.model,
            entry.detail,
            entry.why,
        )
        for entry in entries.data
    ]
    console().print(table(["#>", "when", "proved", "who", "what", "of", "detail", "why"], rows))


def _environ(registry: RegistryOptions, config: Path | None) -> dict[str, str]:
    """Return the environment of the program that imports models, with the settings of this data directory."""
    import os

    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of

    overrides = Overrides(config, {}, os.environ)
    overrides.set("data_dir", data_dir_of(registry.data_dir, overrides))
    return overrides.environ


def _state() -> type[ModelState]:
    from headrace_schemas.http.registry_api import ModelState

    return ModelState


def add_to(app: typer.Typer) -> None:
    command(
        app,
        register,
        "headrace models register models/opponent --name opponent --version-label v1.0 --serve",
        "headrace models register adapters/formal --name formal --base email-agent@3f9c2d",
    )
    command(app, import_, "headrace models import exported/email-agent", name="import")
    command(
        app,
        export,
        "headrace models export email-agent@3f9c2d exported/email-agent",
        "headrace models export email-agent@3f9c2d merged --merge   [dim]# an adapter with its base[/]",
    )
    command(app, serve, "headrace models serve opponent v1.1")
    command(app, unserve, "headrace models unserve opponent v1.0")
    command(
        app,
        alias,
        'headrace models alias opponent stable v1.1 --expect v1.0 --why "wins more"',
        "headrace models alias opponent stable   [dim]# remove it[/]",
    )
    command(app, tag, "headrace models tag opponent v1.0 --add baseline")
    command(app, note, 'headrace models note opponent v1.0 "from the September mail"')
    command(app, notes, "headrace models notes opponent v1.0")
    command(app, retire, 'headrace models retire opponent v1.0 --why "nobody plays it"')
    command(app, collect, "headrace models collect", "headrace models collect --really")
    command(app, audit, "headrace models audit opponent --limit 20")
