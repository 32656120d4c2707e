"""A version is its files: same files, same name; other files, refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime import versions
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import CorruptBlob
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Fingerprint, Manifest

FINGERPRINT = Fingerprint(token_ids=(1, 2, 3), logprobs=(-0.5, -0.25))


def damage(ref: BlobRef) -> None:
    Path(ref.uri.removeprefix("file://")).write_bytes(b"garbage")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore((tmp_path / "blobs").as_uri())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {"model.safetensors": "weights", "tokenizer.json": "{}", "config.json": "{}"}.items():
        (folder / name).write_text(text)
    (folder / "optimizer.pt").write_text("not part of a version")
    return folder


def stored(blobs: BlobStore, folder: Path, step: int = 0) -> tuple[Manifest, BlobRef]:
    return versions.store(blobs, folder, name="m", lineage="main", step=step, fingerprint=FINGERPRINT)


def test_equal_content_is_the_same_version(blobs: BlobStore, folder: Path) -> None:
    manifest, ref = stored(blobs, folder)
    assert stored(blobs, folder) == (manifest, ref)
    assert manifest.version.startswith("m@")
    assert [file.path for file in manifest.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert stored(blobs, folder, step=1)[0].version != manifest.version
    (folder / "model.safetensors").write_text("other weights")
    assert stored(blobs, folder)[0].version != manifest.version


async def test_a_version_comes_back_file_by_file(blobs: BlobStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = stored(blobs, folder)
    cache = versions.VersionCache(blobs, tmp_path / "cache")
    again, path = await cache.fetch(ref)
    assert again == manifest
    assert sorted(file.name for file in path.iterdir()) == [file.path for file in manifest.files]
    assert (path / "model.safetensors").read_text() == "weights"
    assert await cache.fetch(ref) == (manifest, path)
    cache.keep_only([])
    assert not path.exists()


async def test_a_changed_file_in_the_cache_is_refused(blobs: BlobStore, folder: Path, tmp_path: Path) -> None:
    _, ref = stored(blobs, folder)
    cache = versions.VersionCache(blobs, tmp_path / "cache")
    _, path = await cache.fetch(ref)
    (path / "model.safetensors").write_text("tampered")
    with pytest.raises(CorruptBlob, match=r"model\.safetensors"):
        await cache.fetch(ref)
    await cache.fetch(ref)  # fetched anew


async def test_a_corrupt_blob_leaves_nothing_half_done(blobs: BlobStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = stored(blobs, folder)
    damage(manifest.files[1].blob)
    with pytest.raises(CorruptBlob):
        await versions.VersionCache(blobs, tmp_path / "cache").fetch(ref)
    assert list((tmp_path / "cache").iterdir()) == []


def test_something_else_is_no_manifest(blobs: BlobStore) -> None:
    with pytest.raises(CorruptBlob, match="no manifest"):
        versions.read_manifest(blobs, blobs.put(b"{}"))


@pytest.mark.parametrize("path", ["pytorch_model.bin", "a.pkl", "../x.safetensors", "/etc/x.json"])
def test_pickles_and_escapes_are_refused_by_name(path: str) -> None:
    with pytest.raises(ValueError):
        File(path=path, blob=BlobRef(uri="x", sha256="0" * 64, size=1))
