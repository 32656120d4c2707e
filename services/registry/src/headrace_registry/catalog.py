"""Changes of the catalog of versions: register, serve, label, alias, tag, note and retire, also for models without a
trainer.

Each function makes one kind of change. It runs in the transaction of `pages.http.RegistryChanges`, and raises `Refused`
before it has changed anything.

A request either moves all of its aliases by compare-and-swap, or none. The number of versions that operators request to
be served is limited, so that replicas have room for trained versions. A retired version is never served again, and
garbage collection may delete its files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.storage.tables import ALIASES, NOTES, TAGS, VERSIONS
from headrace_registry.versions import lifecycle
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.tables import upsert
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint
from headrace_schemas.http.catalog import NOTES_MAX, AliasMove
from headrace_schemas.values.blobs import BlobRef, File, Manifest

_HASHED_BYTES_MAX = 16 * 2**20


async def read_complete_manifest(blobs: BlobStore, ref: BlobRef, name: str) -> Manifest:
    """Read a manifest, and check that each of its files is in the blob store. Raises `Refused` with a message about the
    problem."""
    try:
        manifest = await asyncio.to_thread(read_manifest, blobs, ref)
        missing = await asyncio.to_thread(lambda: [file.path for file in manifest.files if not _is_stored(blobs, file)])
    except (CorruptBlob, MissingBlob) as error:
        raise Refused(400, "unusable_manifest", str(error), "manifest") from None
    if manifest.name != name:
        raise Refused(400, "other_model", f"its manifest names the model {manifest.name}, not {name}", "manifest")
    if missing:
        paths = ", ".join(missing[:5])
        raise Refused(409, "files_missing", f"{manifest.version}: {paths} not in the blob store as named", "manifest")
    return manifest


def _is_stored(blobs: BlobStore, file: File) -> bool:
    """Return whether the store contains the file. Small files are also compared with their digests. Weights are not;
    each replica checks them before it loads them."""
    if file.blob.size > _HASHED_BYTES_MAX:
        return blobs.holds(file.blob)
    try:
        blobs.get(file.blob)
    except MissingBlob:
        return False
    return True


async def register(
    tx: AsyncConnection,
    now: datetime,
    transition: Transition,
    manifest: Manifest,
    ref: BlobRef,
    label: str | None,
) -> VersionRecord:
    """Register a version that no trainer of this installation made. If it was retired, end the retirement.

    Raises:
        Refused: it can never serve its model.
    """
    existing = await store.load_version(tx, manifest.version)
    await _check_label(tx, manifest, label, existing)
    if existing is None:
        event = Checkpoint(
            time=now,
            model=manifest.name,
            version=manifest.version,
            lineage=manifest.lineage,
            step=manifest.step,
            parent=manifest.parent,
            manifest=ref,
        )
        await transition.register(event, manifest, None, trained=False, label=label)
    else:
        values = {"retired_ms": None, "collected_ms": None, "label": label or existing.label}
        await tx.execute(update(VERSIONS).where(VERSIONS.c.version == existing.version).values(values))
    registered = await store.load_version(tx, manifest.version)
    assert registered is not None
    model = await store.load_model(tx, manifest.name)
    assert model is not None
    await _check_fit(tx, model, registered)
    transition.mark_changed(manifest.name)
    return registered


async def _check_label(
    tx: AsyncConnection, manifest: Manifest, label: str | None, existing: VersionRecord | None
) -> None:
    if label is None:
        return
    if label in ROLES:
        raise Refused(409, "role", f"{label} is the name of a role; choose another label", "label")
    if existing is not None and existing.label not in (None, label):
        raise Refused(
            409, "labelled", f"{existing.version} has the label {existing.label}, and labels never move", "label"
        )
    owner = await store.version_with_label(tx, manifest.name, label)
    if owner not in (None, manifest.version):
        raise Refused(409, "label_taken", f"{label} is the label of {owner}, and labels never move", "label")
    alias_target = (await store.aliases(tx, manifest.name)).get(label)
    if alias_target is not None:
        raise Refused(
            409, "alias_taken", f"{label} is an alias that names {alias_target}; choose another label", "label"
        )


async def _check_fit(tx: AsyncConnection, model: ModelRecord, version: VersionRecord) -> None:
    problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
    if problem is None and version.base:
        problem = await _base_problem(tx, version)
    if problem:
        raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "manifest")


async def _base_problem(tx: AsyncConnection, version: VersionRecord) -> str | None:
    """Return why an adapter does not fit its base, or None if it fits.

    An adapter fits if it has the same tokenizer and chat template as its base.
    """
    base = await store.load_version(tx, version.base or "")
    if base is None:
        return f"its base {version.base} is not registered"
    if base.state in ("withdrawn", "rejected"):
        return f"its base {base.version} was {base.state}"
    if base.retired:
        return f"its base {base.version} is retired; register its files again to bring it back"
    if base.base is not None:
        return f"its base {base.version} is an adapter itself"
    same = (base.tokenizer_sha256, base.template_sha256) == (version.tokenizer_sha256, version.template_sha256)
    return None if same else f"its tokenizer or chat template is not that of its base {base.version}"


async def retire(
    tx: AsyncConnection, now: datetime, transition: Transition, model: ModelRecord, version: VersionRecord
) -> None:
    """Retire a version. Raises `Refused` 409 with the reasons if it is in use."""
    reasons = await reasons_in_use(tx, model, version)
    if reasons:
        raise Refused(409, "in_use", f"{version.version} is used: {'; '.join(reasons)}", "version")
    if not version.retired:
        values = {"retired_ms": epoch_ms(now), "request": "", "served": False}
        await tx.execute(update(VERSIONS).where(VERSIONS.c.version == version.version).values(values))
        transition.mark_changed(model.model)


async def reasons_in_use(tx: AsyncConnection, model: ModelRecord, version: VersionRecord) -> list[str]:
    """Return the reasons why a version is in use and must not be retired; an empty list if it is not in use.

    A version is used by its roles, rollouts and aliases, by an operator's request to serve it, and by adapters of which
    it is the base.
    """
    name = version.version
    roles = {
        "the champion": model.champion,
        "the previous version, to roll back to": model.previous,
        "the candidate": model.candidate,
        "the anchor": model.anchor,
        "pinned": model.pinned,
    }
    reasons = [f"it is {role} of {model.model}" for role, role_version in roles.items() if role_version == name]
    rollouts = [
        rollout
        for rollout in await rollout_store.rollouts_under_way(tx, model.model)
        if name in (rollout.version, rollout.control)
    ]
    reasons += [f"rollout {rollout.rollout_id} is under way with it" for rollout in rollouts]
    reasons += [f"alias {alias} names it" for alias in await store.aliases_of(tx, name)]
    reasons += ["an operator serves it"] if version.served else []
    query = select(VERSIONS.c.version).where(VERSIONS.c.base == name, VERSIONS.c.retired_ms.is_(None))
    adapters = list((await tx.execute(query.where(VERSIONS.c.state != "withdrawn").limit(3))).scalars())
    return reasons + [f"{adapter} is an adapter of it" for adapter in adapters]


TAGS_MAX = 64
"""Maximum number of tags of one version."""


async def change_tags(tx: AsyncConnection, version: VersionRecord, add: Iterable[str], remove: Iterable[str]) -> None:
    """Add and remove tags of a version. Adding an existing tag or removing a missing one has no effect. Raises
    `Refused` 409 for too many tags."""
    removed = TAGS.c.tag.in_(list(remove))
    await tx.execute(delete(TAGS).where(TAGS.c.version == version.version, removed))
    for tag in add:
        await upsert(tx, TAGS, {"version": version.version, "tag": tag}, {}, update=False)
    count = (await tx.execute(select(func.count()).where(TAGS.c.version == version.version))).scalar_one()
    if count > TAGS_MAX:
        raise Refused(
            409, "too_many_tags", f"{version.version} would have {count} tags, at most {TAGS_MAX} are allowed", "add"
        )


async def add_note(tx: AsyncConnection, now: datetime, version: VersionRecord, text: str, author: str) -> None:
    """Add a note to a version. Existing notes are never changed. Raises `Refused` 409 for too many notes."""
    count = (await tx.execute(select(func.count()).where(NOTES.c.version == version.version))).scalar_one()
    if count >= NOTES_MAX:
        raise Refused(
            409, "too_many_notes", f"{version.version} has {count} notes, the most that a version may have", "text"
        )
    await tx.execute(insert(NOTES).values(version=version.version, text=text, who=author, at_ms=epoch_ms(now)))


async def check_served_limit(tx: AsyncConnection, served_max: int) -> None:
    """Check that operators do not request more than `served_max` versions, including the bases of adapters.

    Raises:
        Refused: 409, there are more than `registry.served_max`.
    """
    requested = await store.all_requested_versions(tx)
    bases = [version.base for name in requested if (version := await store.load_version(tx, name)) and version.base]
    counted = [name for name in dict.fromkeys([*requested, *bases]) if not await _has_a_role(tx, name)]
    if len(counted) > served_max:
        raise Refused(
            409,
            "no_room",
            f"{len(counted)} versions would be served besides champions and candidates, registry.served_max is "
            f"{served_max}; unserve one of {', '.join(counted[:8])}",
            "version",
        )


async def _has_a_role(tx: AsyncConnection, name: str) -> bool:
    """Return whether the version has a role (champion, previous, candidate or anchor) because of which replicas load
    it."""
    version = await store.load_version(tx, name)
    model = await store.load_model(tx, version.model) if version else None
    return model is not None and name in (model.champion, model.previous, model.candidate, model.anchor)


ROLES = frozenset(("champion", "canary", "previous", "candidate", "anchor"))
"""Names of roles, which only the registry's own decisions assign. They cannot be used as labels or aliases."""
ALIASES_MAX = 128
"""Maximum number of aliases of one model."""


async def move_aliases(
    tx: AsyncConnection,
    now: datetime,
    transition: Transition,
    model: ModelRecord,
    moves: Mapping[str, AliasMove],
    served_max: int,
) -> str:
    """Make all `moves` of aliases. Return them as JSON for the audit log.

    Raises:
        Refused: 409, an alias does not name the version that its move expects. Then none is moved.
    """
    current = await store.aliases(tx, model.model)
    for alias, move in moves.items():
        await _check(tx, model, alias, move, current.get(alias))
    alias_count = sum(
        moves[alias].version is not None if alias in moves else True for alias in current.keys() | moves.keys()
    )
    if alias_count > ALIASES_MAX:
        raise Refused(
            409, "too_many_aliases", f"model {model.model} would have {alias_count} aliases, {ALIASES_MAX} are the most"
        )
    for alias, move in moves.items():
        if current.get(alias) != move.version:
            await _move(tx, now, model.model, alias, move)
    await check_served_limit(tx, served_max)
    transition.mark_changed(model.model)
    return json.dumps({alias: [move.expected, move.version] for alias, move in sorted(moves.items())})


async def _check(tx: AsyncConnection, model: ModelRecord, alias: str, move: AliasMove, current: str | None) -> None:
    if alias in ROLES:
        raise Refused(409, "role", f"{alias} is moved by promote, rollback and the gate alone", "moves")
    owner = await store.version_with_label(tx, model.model, alias)
    if owner is not None:
        raise Refused(409, "label_taken", f"{alias} is the label of {owner}, and labels never move", "moves")
    if current not in (move.expected, move.version):  # a repeated request succeeds without a change
        target = f"names {current}" if current else "names nothing"
        raise Refused(409, "alias_moved", f"alias {alias} of {model.model} {target} now, not {move.expected}", "moves")
    if move.version is not None:
        await check_servable(tx, model, move.version)


async def check_servable(tx: AsyncConnection, model: ModelRecord, name: str) -> None:
    """Check that a version may be served: it was not withdrawn or rejected, and fits its model. Raises `Refused`
    409."""
    version = await store.require_version(tx, model, name)
    if version.state in ("withdrawn", "rejected"):
        raise Refused(409, version.state, f"{name} was {version.state}; it cannot be served", "version")
    problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
    if problem:
        raise Refused(409, "incompatible_version", f"{name}: {problem}", "version")


async def _move(tx: AsyncConnection, now: datetime, model: str, alias: str, move: AliasMove) -> None:
    """Move one alias. The SQL statement compares the expected version again, because another transaction may have moved
    the alias in the meantime."""
    alias_row = (ALIASES.c.model == model) & (ALIASES.c.alias == alias)
    values = {"version": move.version, "changed_ms": epoch_ms(now)}
    if move.expected is None:
        if move.version is not None:
            await tx.execute(insert(ALIASES).values(model=model, alias=alias, **values))
        return
    unchanged = alias_row & (ALIASES.c.version == move.expected)
    statement = (
        delete(ALIASES).where(unchanged) if move.version is None else update(ALIASES).where(unchanged).values(values)
    )
    changed = (await tx.execute(statement)).rowcount
    assert changed == 1, f"alias {alias} of {model} moved inside a transaction that holds the lease"


async def serve(
    tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord, served_max: int
) -> None:
    """Record that an operator requests a version to be served. Replicas then load and probe it.

    For a model without a trainer, the first such version becomes the champion.
    """
    await check_servable(tx, model, version.version)
    await _set_served(tx, version.version, True)
    await check_served_limit(tx, served_max)
    if model.champion is None and model.candidate is None and not await store.has_trained_version(tx, model.model):
        await transition.request(version, "force")
    transition.mark_changed(model.model)


async def unserve(tx: AsyncConnection, transition: Transition, model: ModelRecord, version: VersionRecord) -> None:
    """Record that an operator no longer requests a version to be served. Replicas then unload it.

    Raises:
        Refused: 409, an alias names it, or a role of a trained model needs it.
    """
    aliases_naming = await store.aliases_of(tx, version.version)
    if aliases_naming:
        raise Refused(
            409,
            "aliased",
            f"{version.version} is named by {', '.join(aliases_naming)}; move these aliases first",
            "version",
        )
    if version.version in (model.champion, model.candidate):
        if await store.has_trained_version(tx, model.model):
            raise Refused(409, "has_a_role", f"{version.version} is champion or candidate of {model.model}", "version")
        await transition.clear_roles(model)
    await _set_served(tx, version.version, False)
    transition.mark_changed(model.model)


async def _set_served(tx: AsyncConnection, name: str, served: bool) -> None:
    await tx.execute(update(VERSIONS).where(VERSIONS.c.version == name).values(served=served))
