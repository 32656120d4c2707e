"""Registers versions from files in the blob store, without a trainer of this installation."""

from __future__ import annotations

import asyncio
from datetime import datetime

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import lifecycle, store
from headrace_registry.catalog import queries
from headrace_registry.catalog.aliases import ROLES
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint
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
    owner = await queries.version_with_label(tx, manifest.name, label)
    if owner not in (None, manifest.version):
        raise Refused(409, "label_taken", f"{label} is the label of {owner}, and labels never move", "label")
    alias_target = (await queries.aliases(tx, manifest.name)).get(label)
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
