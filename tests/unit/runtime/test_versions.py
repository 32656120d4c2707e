"""Tests of version names, and of a gateway's knowledge of versions.

A version is named by its files: equal files give the same name, and other files are refused. A gateway learns versions
and the algorithms that train them only from published records.
"""

from __future__ import annotations

import errno
import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace_runtime.errors import CorruptBlob
from headrace_runtime.kafka.known_versions import KnownVersions
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest

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
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").write_text("tampered")
    with pytest.raises(CorruptBlob, match=r"model\.safetensors"):
        await cache.fetch(ref)
    await cache.fetch(ref)  # fetched anew


async def test_cache_on_the_disk_of_the_store_takes_no_room(blobs: BlobStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = stored(blobs, folder)
    _, path = await versions.VersionCache(blobs, tmp_path / "cache").fetch(ref)
    for stored_file in manifest.files:
        file = path / stored_file.path
        assert file.samefile(stored_file.blob.uri.removeprefix("file://")), file
        assert not file.stat().st_mode & 0o222, "a program that writes to it would change the blob"


async def test_version_is_copied_where_it_cannot_be_linked(
    blobs: BlobStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another disk")

    _, ref = stored(blobs, folder)
    monkeypatch.setattr(os, "link", refuse)
    manifest, path = await versions.VersionCache(blobs, tmp_path / "cache").fetch(ref)
    assert (path / "model.safetensors").read_text() == "weights"
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())
    blobs.delete(manifest.files[1].blob)
    assert (path / "model.safetensors").read_text() == "weights", "a removed blob stays in the cache"


async def test_a_corrupt_blob_leaves_nothing_half_done(blobs: BlobStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = stored(blobs, folder)
    damage(manifest.files[1].blob)
    with pytest.raises(CorruptBlob):
        await versions.VersionCache(blobs, tmp_path / "cache").fetch(ref)
    assert list((tmp_path / "cache").iterdir()) == []


def test_something_else_is_no_manifest(blobs: BlobStore) -> None:
    with pytest.raises(CorruptBlob, match="not a manifest"):
        versions.read_manifest(blobs, blobs.put(b"{}"))


@pytest.mark.parametrize("path", ["pytorch_model.bin", "a.pkl", "../x.safetensors", "/etc/x.json"])
def test_pickles_and_escapes_are_refused_by_name(path: str) -> None:
    with pytest.raises(ValueError):
        File(path=path, blob=BlobRef(uri="x", sha256="0" * 64, size=1))


EMPTY = hashlib.sha256(b"").hexdigest()
TEMPLATES = {
    "chat_template.jinja": "{}",
    "chat_template.json": '{{"chat_template": "{}"}}',
    "tokenizer_config.json": '{{"chat_template": "{}"}}',
    "additional_chat_templates/tools.jinja": "{}",
}


@pytest.mark.parametrize("path", TEMPLATES)
def test_a_template_counts_wherever_it_stands(blobs: BlobStore, folder: Path, path: str) -> None:
    before, _ = stored(blobs, folder)
    assert before.template_sha256 == EMPTY
    digests = []
    for text in ("one", "other"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(TEMPLATES[path].format(text))
        digests.append(stored(blobs, folder)[0])
    assert len({manifest.template_sha256 for manifest in (before, *digests)}) == 3
    assert len({manifest.prompt_sha256 for manifest in (before, *digests)}) == 3
    assert versions.prompt_digests(blobs, digests[1].files) == (digests[1].tokenizer_sha256, digests[1].template_sha256)
    assert versions.template_digest(folder) == digests[1].template_sha256


def test_one_template_in_its_own_file_hashes_as_it_always_has(blobs: BlobStore, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert stored(blobs, folder)[0].template_sha256 == versions.file_digest(folder / "chat_template.jinja")


@pytest.mark.parametrize("config", ["not json", "[]"])
def test_a_tokenizer_configuration_that_is_none_counts_as_a_whole(blobs: BlobStore, folder: Path, config: str) -> None:
    (folder / "tokenizer_config.json").write_text(config)
    assert stored(blobs, folder)[0].template_sha256 != EMPTY


@pytest.mark.parametrize("path", ["generation_config.json", "special_tokens_map.json", "config.json", "vocab.txt"])
def test_what_acts_on_prompts_tells_versions_apart(blobs: BlobStore, folder: Path, path: str) -> None:
    before, _ = stored(blobs, folder)
    (folder / path).write_text('{"changed": true}')
    after, _ = stored(blobs, folder)
    assert after.prompt_sha256 != before.prompt_sha256
    assert (after.token_files != before.token_files) == (path in {"special_tokens_map.json", "vocab.txt"})


def test_weights_do_not(blobs: BlobStore, folder: Path) -> None:
    before, _ = stored(blobs, folder)
    (folder / "model.safetensors").write_text("after a step")
    after, _ = stored(blobs, folder, step=1)
    assert after.prompt_sha256 == before.prompt_sha256
    assert after.token_files == before.token_files == {"tokenizer.json": before.tokenizer_sha256}


SFT = LearnedSignals(algorithm="sft", rewards=False, edits=True, preferences=False, logprobs=False)
KTO = LearnedSignals(algorithm="kto", rewards=True, edits=True, preferences=True, logprobs=False)


def checkpoint(version: str, lineage: str, learns: LearnedSignals | None = None, model: str = "m") -> Checkpoint:
    blob = BlobRef(uri="memory://none", sha256="0" * 64, size=1)
    return Checkpoint(
        time=datetime(2026, 1, 1, tzinfo=UTC), model=model, version=version, lineage=lineage, step=0, manifest=blob,
        learns=learns,
    )  # fmt: skip


def test_the_last_announcement_of_a_models_trainer_counts_for_versions_of_its_lineage(tmp_path: Path) -> None:
    async def refuse(_record: Record, error: Exception) -> None:
        raise error

    versions = KnownVersions(BusSettings(), "test", BlobStore(tmp_path.as_uri()), refuse)
    first, later, job = (f"m@{digit * 16}" for digit in "123")
    assert versions.signals_of("m", first) is None
    versions.checkpoint("m", checkpoint(first, "main", SFT))
    versions.checkpoint("m", checkpoint(job, "of a job"))
    versions.checkpoint("other", checkpoint(first, "main", KTO, model="other"))
    assert versions.signals_of("m", first) == SFT
    assert versions.signals_of("m", later) == SFT, "it may have been announced after this gateway read it"
    assert versions.signals_of("m", job) is None, "the trainer drops it as foreign"
    versions.checkpoint("m", checkpoint(first, "main", KTO))
    assert versions.signals_of("m", first) == KTO, "the trainer was started with another algorithm"


@pytest.mark.parametrize(
    "config", ["[]", "{", '"x"', "3", '{"text_config": []}', '{"vocab_size": "many"}', "[" * 99_999]
)
async def test_a_version_whose_configuration_is_damaged_has_no_known_vocabulary(
    blobs: BlobStore, folder: Path, config: str
) -> None:
    async def refuse(_record: Record, error: Exception) -> None:
        raise error

    (folder / "config.json").write_text(config)
    manifest, ref = stored(blobs, folder)
    versions = KnownVersions(BusSettings(), "test", blobs, refuse)
    versions.checkpoint("m", checkpoint(manifest.version, "main").model_copy(update={"manifest": ref}))
    versions._checkpoints.loaded.set()
    versions._routings.loaded.set()
    known = await versions.models("m")
    assert "m" not in known.vocabularies
    assert manifest.version in known.versions["m"]
