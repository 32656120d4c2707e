"""Records on `checkpoints`: valid, repeated, damaged and contradicting ones."""

from __future__ import annotations

from pathlib import Path

from headrace_runtime.errors import CorruptBlob
from headrace_schemas import Checkpoint
from headrace_schemas.values.blobs import BlobRef
from tests.unit.registry.rig import MODEL, Rig


def damage(ref: BlobRef) -> None:
    Path(ref.uri.removeprefix("file://")).write_bytes(b"garbage")


async def publish(rig: Rig, version: str, manifest: BlobRef, *, step: int = 0, lineage: str = "main") -> None:
    event = Checkpoint(
        time=rig.clock.now(), model=MODEL, version=version, lineage=lineage, step=step, manifest=manifest
    )
    await rig.receive(event.to_json())


async def test_checkpoint_handler_registers_a_repeated_checkpoint_once(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    assert await rig.checkpoint(0) == version
    assert rig.decided() == [("registered", version)]


async def test_checkpoint_handler_never_changes_a_registered_version(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    before = await rig.record(champion)
    _, other = rig.manifest(9)
    await publish(rig, champion, other, lineage="evil")
    assert await rig.record(champion) == before


async def test_invalid_checkpoint_is_dead_lettered_and_the_next_registered(rig: Rig) -> None:
    await rig.receive(b"{not json")
    await rig.receive(b'{"model": "m"}')
    version = await rig.checkpoint(0)
    assert [letter.reason for letter in rig.dead_letters] == ["invalid_json", "invalid_event"]
    assert rig.decided() == [("registered", version)]


async def test_checkpoint_handler_rejects_a_manifest_of_another_version(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    claimed = f"{MODEL}@{'0' * 16}"
    await publish(rig, claimed, ref)
    assert rig.last("rejected").reason == f"its manifest is that of {manifest.version}"
    assert await rig.state(claimed) == "rejected"


async def test_checkpoint_handler_rejects_a_contradicting_manifest(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    await publish(rig, manifest.version, ref, step=5)
    assert rig.last("rejected").reason == "its manifest has another lineage, step or parent than the checkpoint"


async def test_checkpoint_handler_rejects_a_damaged_manifest(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    damage(ref)
    await publish(rig, manifest.version, ref)
    assert "do not hash to" in (rig.last("rejected").reason or "")


async def test_checkpoint_handler_rejects_a_file_that_is_not_a_manifest(rig: Rig) -> None:
    await publish(rig, f"{MODEL}@{'0' * 16}", rig.blobs.put(b"{}"))
    assert "is not a manifest" in (rig.last("rejected").reason or "")
    assert CorruptBlob.__name__ not in (rig.last("rejected").reason or "")


async def test_checkpoint_handler_rejects_a_missing_manifest_at_once(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    rig.blobs.delete(ref)
    await publish(rig, manifest.version, ref)
    assert "its manifest does not exist" in (rig.last("rejected").reason or "")
