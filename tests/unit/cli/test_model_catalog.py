"""Tests of `headrace models` (`register`, `export`, `alias` and others) and of `headrace trinity convert`.

The registry has prepared responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_operations import catalog
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.http.catalog import AuditEntry, AuditList, CollectedVersion, GarbageReport, KeptVersion
from headrace_schemas.http.registry_api import ModelState, VersionList, VersionState
from headrace_schemas.programs import MANIFEST_FILE, StoredLine
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from tests.docs.fences import check
from tests.parity.stage import EXPLORER, TRAINER
from tests.unit.cli.doubles import HttpFake
from tests.unit.cli.test_cli import headrace

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def http() -> Iterator[HttpFake]:
    fake = HttpFake()
    yield fake
    fake.stop()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore((tmp_path / "blobs").as_uri())


def stored(
    blobs: BlobStore, weights: bytes = b"w", config: str = '{"a": {"b": 1}}', base: str | None = None
) -> tuple[Manifest, BlobRef]:
    named = {"config.json": config.encode(), "model.safetensors": weights, "tokenizer.json": b"{}"}
    files = tuple(File(path=path, blob=blobs.put(content)) for path, content in named.items())
    manifest = Manifest(
        name="m",
        lineage="registered",
        step=0,
        kind="lora" if base else "full",
        base=base,
        files=files,
        fingerprint=Fingerprint(token_ids=(1, 2, 3), logprobs=(-1.0, -float(len(weights)))),
        tokenizer_sha256="a" * 64,
        template_sha256="b" * 64,
    )
    return versions.store_manifest(blobs, manifest)


def serve_versions(http: HttpFake, *stored_versions: tuple[Manifest, BlobRef], **more: object) -> None:
    """Serve `stored_versions` from the registry. The first version has the label `m:v1.0` and the alias `stable`."""
    data = [
        VersionState.model_validate(
            {
                "id": manifest.version, "model": "m", "lineage": "registered", "step": 0, "state": "registered",
                "registered_at": NOW, "trained": False, "manifest": ref, "base": manifest.base,
                "label": None if number else "v1.0", **more,
            }
        )
        for number, (manifest, ref) in enumerate(stored_versions)
    ]  # fmt: skip
    http.answer("GET", "/v1/models/m/versions", json.loads(VersionList(data=tuple(data)).model_dump_json()))
    state = ModelState(id="m", revision=1, aliases={"stable": stored_versions[0][0].version})
    http.answer("GET", "/v1/models/m", json.loads(state.model_dump_json(exclude_none=True)))
    for word in ("register", "serve", "unserve", "aliases", "retire", "tags", "notes"):
        http.answer("POST", f"/v1/models/m/{word}", json.loads(state.model_dump_json(exclude_none=True)), status=200)


def models(http: HttpFake, *arguments: str) -> tuple[int, str]:
    return headrace("models", *arguments, "--registry", http.url, "--who", "ada")


def test_a_folder_is_registered(
    http: HttpFake, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, ref = stored(blobs)
    serve_versions(http, (manifest, ref))
    requests: list[tuple[Path, str | None, BlobRef | None]] = []

    async def take(folder: Path, name: str | None, base: BlobRef | None, _environ: object) -> StoredLine:
        requests.append((folder, name, base))
        return StoredLine(version=manifest.version, manifest=ref)

    monkeypatch.setattr(catalog, "store_folder", take)
    folder = str(tmp_path / "model")
    status, text = models(http, "register", folder, "--name", "m", "--version-label", "v1.0", "--why", "to play")
    assert (status, manifest.version in text) == (0, True)
    assert requests == [(Path(folder), "m", None)]
    assert http.bodies == [{"manifest": ref.model_dump(), "label": "v1.0", "serve": False, "why": "to play"}]
    assert models(http, "register", folder, "--name", "m", "--base", "m:v1.0", "--serve")[0] == 0
    assert requests[-1][2] == ref


def test_an_export_is_the_versions_own_files_and_its_manifest(http: HttpFake, blobs: BlobStore, tmp_path: Path) -> None:
    manifest, ref = stored(blobs)
    serve_versions(http, (manifest, ref))
    target = tmp_path / "exported"
    status, text = models(http, "export", "m:v1.0", str(target))
    assert status == 0, text
    for file in manifest.files:
        assert versions.file_digest(target / file.path) == file.blob.sha256
    assert Manifest.model_validate_json((target / MANIFEST_FILE).read_bytes()).version == manifest.version
    status, text = models(http, "export", "m:v1.0", str(target))
    assert (status, "is not empty" in text) == (2, True)


def test_a_collected_version_is_not_exported(http: HttpFake, blobs: BlobStore, tmp_path: Path) -> None:
    serve_versions(http, stored(blobs), collected=True)
    status, text = models(http, "export", "m:v1.0", str(tmp_path / "x"))
    assert (status, "its files were collected" in text) == (2, True)


def test_a_flipped_byte_in_the_store_is_not_exported(http: HttpFake, blobs: BlobStore, tmp_path: Path) -> None:
    manifest, ref = stored(blobs)
    serve_versions(http, (manifest, ref))
    path = blobs._path(manifest.files[1].blob.sha256)
    blobs.delete(manifest.files[1].blob)
    Path(path).write_bytes(b"x")
    status, text = models(http, "export", "m:v1.0", str(tmp_path / "exported"))
    assert (status, "does not match the digest in its name" in text) == (1, True)


def test_only_an_adapter_is_merged(http: HttpFake, blobs: BlobStore, tmp_path: Path) -> None:
    serve_versions(http, stored(blobs))
    status, text = models(http, "export", "m:v1.0", str(tmp_path / "x"), "--merge")
    assert (status, "full weights already" in text) == (2, True)


def test_an_alias_moves_only_from_its_expected_version(http: HttpFake, blobs: BlobStore) -> None:
    first, second = stored(blobs), stored(blobs, b"ww")
    serve_versions(http, first, second)
    first_version, second_version = first[0].version, second[0].version
    assert models(http, "alias", "m", "stable", second_version, "--why", "better")[0] == 0
    assert http.bodies[-1] == {
        "moves": {"stable": {"version": second_version, "expected": first_version}},
        "why": "better",
    }
    assert models(http, "alias", "m", "fresh", "stable", "--expect", "nothing")[0] == 0
    assert http.bodies[-1]["moves"] == {"fresh": {"version": first_version, "expected": None}}
    assert models(http, "alias", "m", "stable", "--expect", second_version)[0] == 0
    assert http.bodies[-1]["moves"] == {"stable": {"version": None, "expected": second_version}}


def test_versions_are_found_by_label_alias_and_first_letters(http: HttpFake, blobs: BlobStore) -> None:
    first, second = stored(blobs), stored(blobs, b"ww")
    serve_versions(http, first, second)
    for word in ("v1.0", "stable", first[0].version, first[0].version.partition("@")[2][:6]):
        assert models(http, "serve", "m", word)[0] == 0
        assert http.bodies[-1] == {"version": first[0].version, "why": ""}
    for command in (["unserve", "m", "v1.0"], ["retire", "m", "v1.0"], ["note", "m", "v1.0", "text"]):
        assert models(http, *command)[0] == 0
    assert models(http, "tag", "m", "v1.0", "--add", "a", "--remove", "b")[0] == 0
    assert http.bodies[-1]["add"] == ["a"]


def test_garbage_and_the_log_are_shown(http: HttpFake) -> None:
    version = "m@0123456789abcdef"
    collected = CollectedVersion(version=version, files=3, size_bytes=2_000_000)
    retained = KeptVersion(version="m@fedcba9876543210", needed_by=("lineage main goes on from it",))
    report = GarbageReport(dry_run=True, collected=(collected,), kept=(retained,), size_bytes=2_000_000)
    http.answer("POST", "/v1/garbage", json.loads(report.model_dump_json()))
    status, text = models(http, "collect")
    assert (status, "2.0 MB would be removed" in text, "lineage main" in text) == (0, True, True)
    assert http.bodies[-1]["dry_run"] is True
    assert models(http, "collect", "--really", "--why", "room")[0] == 0
    assert http.bodies[-1] == {"dry_run": False, "why": "room"}
    entry = AuditEntry(number=7, at=NOW, principal="open", who="ada", action="retire", model="m", why="old")
    http.answer("GET", "/v1/audit", json.loads(AuditList(data=(entry,)).model_dump_json()))
    status, text = models(http, "audit", "m")
    assert (status, "ada" in text, "retire" in text, "old" in text) == (0, True, True, True)


def test_two_versions_differ_in_settings_and_answers(blobs: BlobStore) -> None:
    (old, _), (new, _) = stored(blobs), stored(blobs, b"www", '{"a": {"b": 2}, "c": [1]}')
    changes = {
        change.what: (change.before, change.after) for change in catalog.compare_settings(old, new, catalog.fetch_file)
    }
    assert changes["config.json: a.b"] == ("1", "2")
    assert changes["config.json: c"] == (None, "[1]")
    assert "model.safetensors" in changes
    assert "tokenizer.json" not in changes
    difference = catalog.compare_fingerprints(old.fingerprint, new.fingerprint)
    assert difference is not None
    assert (difference.tokens, difference.mean, difference.most) == (2, 1.0, 2.0)
    elsewhere = Fingerprint(token_ids=(4, 5), logprobs=(-1.0,))
    assert catalog.compare_fingerprints(old.fingerprint, elsewhere) is None


def convert(folder: Path, *words: str, **changed: object) -> tuple[int, str]:
    (folder / "explorer.yaml").write_text(yaml.safe_dump(EXPLORER))
    (folder / "trainer.yaml").write_text(yaml.safe_dump({**TRAINER, **changed}))
    result = CliRunner().invoke(app, ["trinity", "convert", "explorer.yaml", "trainer.yaml", *words])
    return result.exit_code, result.output


def test_both_files_become_settings_that_services_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = convert(tmp_path)
    assert status == 0
    assert "explorer.rollout_model.engine_num" in output
    check((tmp_path / "headrace.toml").read_text(), tmp_path)
    status, output = convert(tmp_path)
    assert status == 2
    assert "exists already" in output


def test_an_unknown_key_is_named_and_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = convert(tmp_path, "--out", "other.toml", synchronizer={"sync_method": "nccl"}, surprise=1)
    assert status == 2
    assert "synchronizer.sync_method = 'nccl'" in output
    assert "surprise = 1" in output
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(text)
    assert CliRunner().invoke(app, ["trinity", "convert", "one.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["trinity", "convert", "none.yaml"]).exit_code == 2
