"""`headrace models register, import, export, serve, unserve, alias, tag, note, notes, retire, collect, audit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.model_options import Name, RegistryOptions, VersionName, Why, find, full_name, parted
from headrace_cli.commands.shared import AsJson, Config, command, console, echo_json, table

if TYPE_CHECKING:
    from headrace_schemas.blobs import BlobRef
    from headrace_schemas.registry_api import ModelState

Folder = Annotated[Path, typer.Argument(help="A folder as Hugging Face or PEFT write it.", metavar="FOLDER")]
Label = Annotated[
    str | None, typer.Option("--version-label", help="A name for this version alone, such as v1.0.", metavar="LABEL")
]


@dataclass(frozen=True)
class FolderOptions:
    """What a folder's version shall be."""

    version_label: Label = None
    base: Annotated[
        str | None,
        typer.Option("--base", help="Of an adapter: the version that it applies to.", metavar="MODEL@DIGEST"),
    ] = None
    serve: Annotated[bool, typer.Option("--serve", help="Have replicas load it now.")] = False
    why: Why = ""
    config: Config = None


def register(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="The model's name.", metavar="MODEL")],
    *,
    wanted: FolderOptions,
    at: RegistryOptions,
) -> None:
    """Make a version of a model that nobody trains: an opponent, a teacher, a judge, v1.0 beside v1.1.

    The folder is loaded as a replica loads it and has to answer as transformers' own code does; then its files go into
    the blob store. What it answers is captured and never trained.
    """
    _take(folder, name, wanted, at)


def import_(
    folder: Folder,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name; default: the exported one's.", metavar="MODEL")
    ] = None,
    *,
    wanted: FolderOptions,
    at: RegistryOptions,
) -> None:
    """Take a folder that `export` wrote, as the very same version, or any other folder as a new one.

    An exported folder is checked file by file against its manifest.
    """
    _take(folder, name, wanted, at)


def _take(folder: Path, name: str | None, wanted: FolderOptions, at: RegistryOptions) -> None:
    import asyncio

    from headrace_operations.catalog import importing

    with at.open() as api:
        below: BlobRef | None = None
        if wanted.base is not None:
            below = find(api, *parted(wanted.base)).manifest
        with console().status(f"loading {folder} as a replica would"):
            made = asyncio.run(importing.stored(folder.absolute(), name, below, _environ(at, wanted.config)))
        importing.register(api, made, label=wanted.version_label, serve=wanted.serve, why=wanted.why)
    model, label = made.version.partition("@")[0], wanted.version_label
    console().print(f"[bold]{made.version}[/] is registered" + (f" as {model}:{label}" if label else ""))
    if not wanted.serve:
        console().print(f"serve it with [bold]headrace models serve {model} {label or made.version}[/]")


def export(
    version: Annotated[str, typer.Argument(help="MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")],
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="FOLDER")],
    merge: Annotated[bool, typer.Option("--merge", help="Of an adapter: whole weights, base and adapter.")] = False,
    config: Config = None,
    *,
    at: RegistryOptions,
) -> None:
    """Write a version as a folder: whole weights for transformers and vLLM, an adapter for PEFT and vLLM.

    The folder's manifest makes the very same version of it again with `import`. What is merged is a new model.
    """
    import asyncio

    from headrace.errors import UsageError
    from headrace_operations.catalog import exporting, importing

    exporting.check_empty(folder)
    with at.open() as api:
        found = find(api, *parted(version))
        if found.manifest is None or found.collected:
            raise UsageError(f"{found.id}: its files are gone; register them again to bring it back")
        if merge and found.base is None:
            raise UsageError(f"{found.id} has whole weights already; leave --merge out")
        if merge and found.base is not None:
            below = find(api, *parted(found.base)).manifest
            assert below is not None
            with console().status(f"merging {found.id} into {found.base}"):
                asyncio.run(importing.merged(found.manifest, below, folder.absolute(), _environ(at, config)))
        else:
            size_bytes = exporting.export(exporting.manifest_of(found.manifest), folder)
            console().print(f"{size_bytes / 1e6:,.1f} MB")
    console().print(f"{found.id} is in [bold]{folder}[/]")
    if found.base and not merge:
        console().print(f"it is an adapter of {found.base}, which `export` writes, too")


def serve(name: Name, version: VersionName, why: Why = "", *, at: RegistryOptions) -> None:
    """Have replicas load and probe a version beside what they serve. Clients reach it as MODEL@DIGEST or MODEL:LABEL.

    The first version of a model that nobody trains becomes its champion by this, so `model: NAME` reaches it.
    """
    from headrace_schemas.catalog import ServeRequest

    with at.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/serve", _state(), ServeRequest(version=full, why=why))
    console().print(f"{full} will be served; follow it with [bold]headrace models show {name}[/]")


def unserve(name: Name, version: VersionName, why: Why = "", *, at: RegistryOptions) -> None:
    """Let replicas drop a version that was served because somebody asked for it."""
    from headrace_schemas.catalog import ServeRequest

    with at.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/unserve", _state(), ServeRequest(version=full, why=why))
    console().print(f"{full} is not served any more")


def alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Such as stable.", metavar="ALIAS")],
    version: Annotated[str | None, typer.Argument(help="What it shall name; left out: remove it.")] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect", help="What it names now, or `nothing`; default: what is read first.", metavar="VERSION"
        ),
    ] = None,
    why: Why = "",
    *,
    at: RegistryOptions,
) -> None:
    """Move an alias, if it still names what you think it does: of two who move it at once, one is told so.

    Clients reach it as MODEL:ALIAS. What an alias names is served, and is not retired.
    """
    from headrace_schemas.catalog import AliasesRequest, AliasMove

    with at.open() as api:
        if expect is None:
            expected = api.model(name).aliases.get(alias)
        else:
            expected = None if expect == "nothing" else full_name(api, name, expect)
        target = full_name(api, name, version) if version else None
        moves = {alias: AliasMove(version=target, expected=expected)}
        api.ask("POST", f"/v1/models/{name}/aliases", _state(), AliasesRequest(moves=moves, why=why))
    console().print(f"{name}:{alias} names [bold]{target or 'nothing'}[/], before that {expected or 'nothing'}")


def tag(
    name: Name,
    version: VersionName,
    add: Annotated[list[str] | None, typer.Option("--add", help="May be repeated.", metavar="TAG")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="May be repeated.", metavar="TAG")] = None,
    why: Why = "",
    *,
    at: RegistryOptions,
) -> None:
    """Tag a version, or remove tags."""
    from headrace_schemas.catalog import TagsRequest

    with at.open() as api:
        full = full_name(api, name, version)
        request = TagsRequest(version=full, add=tuple(add or ()), remove=tuple(remove or ()), why=why)
        api.ask("POST", f"/v1/models/{name}/tags", _state(), request)
        tags = find(api, name, full).tags
    console().print(f"{full}: {' '.join(tags) or 'no tags'}")


def note(
    name: Name, version: VersionName, text: Annotated[str, typer.Argument(metavar="TEXT")], *, at: RegistryOptions
) -> None:
    """Write something down about a version. Notes stay as they are."""
    from headrace_schemas.catalog import NoteRequest

    with at.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/notes", _state(), NoteRequest(version=full, text=text))
    console().print(f"noted about {full}")


def notes(name: Name, version: VersionName, *, at: RegistryOptions) -> None:
    """What was written down about a version."""
    from headrace_schemas.catalog import NoteList

    with at.open() as api:
        full = full_name(api, name, version)
        found = api.ask("GET", f"/v1/models/{name}/notes?version={full}", NoteList).data
    rows = [(f"{one.at:%Y-%m-%d %H:%M}", one.who, one.text) for one in found]
    console().print(table(["when", "who", "note"], rows, full))


def retire(name: Name, version: VersionName, why: Why = "", *, at: RegistryOptions) -> None:
    """Let a version never serve again. Refused for what has a role, an alias or a pin, or is served."""
    from headrace_schemas.catalog import RetireRequest

    with at.open() as api:
        full = full_name(api, name, version)
        api.ask("POST", f"/v1/models/{name}/retire", _state(), RetireRequest(version=full, why=why))
    console().print(f"{full} is retired; [bold]headrace models collect[/] says what its files take")


def collect(
    really: Annotated[bool, typer.Option("--really", help="Remove it; without this it is a dry run.")] = False,
    why: Why = "",
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Remove the files of retired versions that nobody needs: no role, alias, pin, adapter, lineage or rollout.

    Manifests stay, so that a version can be explained for ever.
    """
    from headrace_schemas.catalog import GarbageReport, GarbageRequest

    with at.open() as api:
        report = api.ask("POST", "/v1/garbage", GarbageReport, GarbageRequest(dry_run=not really, why=why))
    if json:
        echo_json(report.model_dump_json())
        return
    rows = [(one.version, str(one.files), f"{one.size_bytes / 1e6:,.1f}", "") for one in report.collected]
    rows += [(one.version, "-", "-", "; ".join(one.needed_by)) for one in report.kept]
    console().print(table(["version", "files>", "MB>", "needed by"], rows))
    done = "would be removed; do it with --really" if report.dry_run else "were removed"
    console().print(f"{report.size_bytes / 1e6:,.1f} MB {done}")


def audit(
    name: Annotated[str | None, typer.Argument(help="Only of this model.", metavar="MODEL")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest first.")] = 50,
    before: Annotated[int | None, typer.Option(help="Only those with a smaller number.")] = None,
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Who changed what, when and why. `proved` is what the key shows, `who` is what the asker says."""
    from urllib.parse import urlencode

    from headrace_schemas.catalog import AuditList

    asked = {"limit": limit, "model": name, "before": before}
    query = urlencode({key: value for key, value in asked.items() if value is not None})
    with at.open() as api:
        found = api.ask("GET", f"/v1/audit?{query}", AuditList)
    if json:
        echo_json(found.model_dump_json())
        return
    rows = [
        (
            str(e.number),
            f"{e.at:%Y-%m-%d %H:%M:%S}",
            e.principal,
            e.who,
            e.action,
            e.version or e.model,
            e.detail,
            e.why,
        )
        for e in found.data
    ]
    console().print(table(["#>", "when", "proved", "who", "what", "of", "detail", "why"], rows))


def _environ(at: RegistryOptions, config: Path | None) -> dict[str, str]:
    """The settings of the program, as `up` has them here."""
    import os

    from headrace_operations.supervisor.overrides import Overrides
    from headrace_operations.supervisor.plan import data_dir_of

    overrides = Overrides(config, {}, os.environ)
    overrides.set("data_dir", data_dir_of(at.data_dir, overrides))
    return overrides.environ


def _state() -> type[ModelState]:
    from headrace_schemas.registry_api import ModelState

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
