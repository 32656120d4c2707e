"""Registers versions from files in the blob store, without a trainer of this installation; tags, notes and retirement.

A retired version never serves again, and its files may be collected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.catalog.aliases import ROLES
from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.storage.tables import NOTES, TAGS, VERSIONS
from headrace_registry.versions import lifecycle
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.tables import upsert
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint
from headrace_schemas.http.catalog import NOTES_MAX
from headrace_schemas.values.blobs import BlobRef, File, Manifest

_HASHED_BYTES_MAX = 16 * 2**20


async def read_complete_manifest(blobs: BlobStore, ref: BlobRef, name: str) -> Manifest:
    """Return the manifest after checking that each of its files is in the store. Raises `Refused` with the problem."""
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
    """Return whether the store has the file. Small files are hashed here; each replica hashes weights before it loads
    them."""
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
    """Add the version, or bring it back if it was retired. Raises `Refused` when it could never serve its model."""
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
    """Return why the base does not fit: an adapter must have the tokenizer and template of its base."""
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
    """Return why the registry's own state needs a version."""
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
"""Largest number of tags of one version."""


async def change_tags(tx: AsyncConnection, version: VersionRecord, add: Iterable[str], remove: Iterable[str]) -> None:
    """Add and remove tags. Existing tags may be added again, and missing tags may be removed."""
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
    """Add a note. Notes are never changed."""
    count = (await tx.execute(select(func.count()).where(NOTES.c.version == version.version))).scalar_one()
    if count >= NOTES_MAX:
        raise Refused(
            409, "too_many_notes", f"{version.version} has {count} notes, the most that a version may have", "text"
        )
    await tx.execute(insert(NOTES).values(version=version.version, text=text, who=author, at_ms=epoch_ms(now)))
