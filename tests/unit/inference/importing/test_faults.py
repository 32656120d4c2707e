"""Hundreds of injected faults between the blob store and a replica are refused with a name, and never served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_inference.errors import UnknownVersion
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ServedVersion
from headrace_schemas.values.blobs import BlobRef, Manifest
from tests.unit.inference.conftest import Models, Stored
from tests.unit.inference.test_fleet import Rig

FLIPS = 240


@pytest.fixture
def rig(models: Models, tmp_path: Path) -> Rig:
    return Rig(models, tmp_path / "cache", versions_max=8)


def damages(chance: random.Random, stored: Stored) -> Iterator[tuple[BlobRef, int, int]]:
    """Blob, place and bit: over the manifest and every file in turn."""
    blobs = [stored.served.manifest, *(file.blob for file in stored.manifest.files)]
    blobs = [blob for blob in blobs if blob.size]
    while True:
        for blob in blobs:
            yield blob, chance.randrange(blob.size), 1 << chance.randrange(8)


async def refused(rig: Rig, served: ServedVersion, *other_versions: ServedVersion) -> str:
    """The reason why the replica does not serve it."""
    rig.route(served, *other_versions)
    await rig.until(lambda: rig.states.get(served.version) == "failed")
    reason = rig.error(served)
    with pytest.raises(UnknownVersion):
        rig.fleet.find(served.version)
    assert served.version not in rig.engine.held
    rig.route(*other_versions)
    await rig.until(lambda: served.version not in rig.states)
    return reason


async def test_flipped_bytes_in_the_store(rig: Rig, models: Models) -> None:
    """In the manifest, and in every file of a whole version and of an adapter."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    rig.route(models.second.served)
    await rig.settled(second="ready")
    for stored in (models.first, models.adapter):
        base_versions = () if stored is models.first else (models.first.served,)
        rig.route(models.second.served, *base_versions)
        await rig.until(
            lambda base=base_versions: all(rig.states.get(o.version) == "ready" for o in base)  # type: ignore[misc]
        )
        faults = damages(chance, stored)
        for _ in range(FLIPS // 2):
            blob, offset, bit = next(faults)
            with damaged(models.blobs, blob, offset, bit):
                reason = await refused(rig, stored.served, models.second.served, *base_versions)
            assert blob.sha256 in reason, reason
    assert rig.states[models.second.version] == "ready", "nobody else noticed"


@contextmanager
def damaged(blobs: BlobStore, blob: BlobRef, offset: int, bit: int) -> Iterator[None]:
    """One bit of a blob is another one inside."""
    path = Path(blobs._path(blob.sha256))
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :])
    yield
    path.write_bytes(content)


def changed(models: Models, stored: Stored, **fields: object) -> ServedVersion:
    """The version with something else in its manifest, which makes it another version."""
    manifest = Manifest.model_validate({**stored.manifest.model_dump(), **fields})
    return ServedVersion(version=manifest.version, manifest=models.blobs.put(manifest.canonical_json()))


@pytest.mark.parametrize("number", range(20))
async def test_a_version_with_anothers_tokens_is_not_served_beside_it(rig: Rig, models: Models, number: int) -> None:
    """One model has one tokenizer and one template."""
    other = f"{number:02x}" * 32
    field = ("tokenizer_sha256", "template_sha256")[number % 2]
    rig.route(models.second.served)
    await rig.settled(second="ready")
    served = changed(models, models.first, **{field: other})
    reason = await refused(rig, served, models.second.served)
    assert field in reason
    assert models.second.version in reason


@pytest.mark.parametrize("number", range(20))
async def test_an_adapter_without_its_own_base_is_not_served(rig: Rig, models: Models, number: int) -> None:
    rig.route(models.second.served)
    await rig.settled(second="ready")
    base = f"tiny@{number:016x}"
    reason = await refused(rig, changed(models, models.adapter, base=base), models.second.served)
    assert base in reason


async def test_a_manifest_of_another_version_is_not_served(rig: Rig, models: Models) -> None:
    impostor = ServedVersion(version=models.second.version, manifest=models.first.served.manifest)
    reason = await refused(rig, impostor)
    assert f"its manifest is that of {models.first.version}" in reason
