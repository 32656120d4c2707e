"""Takes a version whose files are in the blob store and that nobody trains here."""

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
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.versions import read_manifest
from headrace_schemas import Checkpoint
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Manifest

_HASHED_BYTES_MAX = 16 * 2**20


async def read(blobs: BlobStore, ref: BlobRef, name: str) -> Manifest:
    """The manifest, once each of its files is known to be in the store. Raises `Refused` with what is wrong."""
    try:
        manifest = await asyncio.to_thread(read_manifest, blobs, ref)
        missing = await asyncio.to_thread(lambda: [one.path for one in manifest.files if not _whole(blobs, one)])
    except (CorruptBlob, MissingBlob) as error:
        raise Refused(400, "unusable_manifest", str(error), "manifest") from None
    if manifest.name != name:
        raise Refused(400, "other_model", f"its manifest names the model {manifest.name}, not {name}", "manifest")
    if missing:
        several = ", ".join(missing[:5])
        raise Refused(409, "files_missing", f"{manifest.version}: {several} not in the blob store as named", "manifest")
    return manifest


def _whole(blobs: BlobStore, file: File) -> bool:
    """Whether the store has it. Small files are hashed here; weights are by each replica, before it loads them."""
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
    """Add it, or bring it back when it was retired. Raises `Refused` when it could never serve its model."""
    known = await store.version(tx, manifest.version)
    await _check_label(tx, manifest, label, known)
    if known is None:
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
        values = {"retired_ms": None, "collected_ms": None, "label": label or known.label}
        await tx.execute(update(VERSIONS).where(VERSIONS.c.version == known.version).values(values))
    found = await store.version(tx, manifest.version)
    assert found is not None
    model = await store.model(tx, manifest.name)
    assert model is not None
    await _check_fit(tx, model, found)
    transition.touch(manifest.name)
    return found


async def _check_label(tx: AsyncConnection, manifest: Manifest, label: str | None, known: VersionRecord | None) -> None:
    if label is None:
        return
    if label in ROLES:
        raise Refused(409, "role", f"{label} is a role, and no version's label", "label")
    if known is not None and known.label not in (None, label):
        raise Refused(409, "labelled", f"{known.version} has the label {known.label}, and labels never move", "label")
    owner = await queries.labelled(tx, manifest.name, label)
    if owner not in (None, manifest.version):
        raise Refused(409, "label_taken", f"{label} is the label of {owner}, and labels never move", "label")
    aliased = (await queries.aliases(tx, manifest.name)).get(label)
    if aliased is not None:
        raise Refused(409, "alias_taken", f"{label} is an alias that names {aliased}; choose another label", "label")


async def _check_fit(tx: AsyncConnection, model: ModelRecord, version: VersionRecord) -> None:
    problem = lifecycle.objection(version, await store.view(tx, model, "", version))
    if problem is None and version.base:
        problem = await _base_problem(tx, version)
    if problem:
        raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "manifest")


async def _base_problem(tx: AsyncConnection, version: VersionRecord) -> str | None:
    """An adapter has tokens and template of its base, and of no other."""
    base = await store.version(tx, version.base or "")
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
