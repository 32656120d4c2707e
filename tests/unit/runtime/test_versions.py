"""Tests of version names, which equal files share, and of base models from a hub.

A base model is downloaded once, pinned by commit, loaded offline, and refused with a remedy. huggingface_hub runs in
child processes, because it reads its environment variables at import.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headrace_runtime.errors import CorruptBlob
from headrace_runtime.storage import versions
from headrace_runtime.storage.base_files import ORIGIN_FILE
from headrace_runtime.storage.base_models import Repository
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from tests.support.packages import FakeHub, HubRepository
from tests.support.processes import free_port

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


NAME = "acme/tiny"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors": bytes(range(256)) * 40,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
OTHER_FILES = {
    "README.md": b"# tiny",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.onnx": b"graph",
    "original/consolidated.safetensors": b"and again",
}
PROGRAM = """
import json, sys
from pathlib import Path
from headrace_runtime.storage import base_models
from headrace_runtime.errors import HeadraceError
from headrace_operations import catalog
for line in sys.stdin:
    action, name, folder = json.loads(line)
    try:
        if action == "pull":
            result = base_models.fetch(base_models.describe(base_models.Repository.parse(name)), Path(folder))
        elif action == "push":
            result = catalog.push(Path(folder), name, message="a version", private=True)
        else:
            result = base_models.resolve(name, Path(folder))
        print(json.dumps({"folder": str(result)}), flush=True)
    except HeadraceError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as hub:
        hub.repositories[NAME] = HubRepository()
        hub.repositories[NAME].commit({**FILES, **OTHER_FILES})
        yield hub


class Client:
    """Caller of huggingface_hub that uses one child process for each set of environment variables."""

    def __init__(self, address: str, home: Path) -> None:
        self.home = home
        self._environ = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_HUB_ETAG_TIMEOUT": "2"}
        self._processes: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}

    def call(self, action: str, name: str, folder: Path, **environ: str) -> dict[str, str]:
        process = self._processes.get(key := frozenset(environ.items()))
        if process is None:
            process = self._processes[key] = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], text=True, cwd=self.home, env={**self._environ, **environ},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([action, name, str(folder)]) + "\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "")
        answer: dict[str, str] = json.loads(
            next(line for line in lines if line.startswith("{"))
        )  # others are log lines
        return answer

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()

    def resolve(self, name: str, **environ: str) -> dict[str, str]:
        return self.call("resolve", name, self.home / "data", **environ)


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> Iterator[Client]:
    client = Client(hub.address, tmp_path)
    yield client
    client.close()


def content_of(folder: str) -> Mapping[str, bytes]:
    path = Path(folder)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_fetches_the_files_of_the_model_and_records_the_commit(hub: FakeHub, client: Client) -> None:
    folder = client.resolve(NAME)["folder"]
    origin = {"repository": NAME, "commit": hub.repositories[NAME].branches["main"]}
    files = dict(content_of(folder))
    assert json.loads(files.pop(ORIGIN_FILE)) == origin
    assert files == FILES


def test_later_starts_need_no_hub_and_keep_the_commit(hub: FakeHub, client: Client) -> None:
    folder = client.resolve(NAME)["folder"]
    hub.repositories[NAME].commit({**FILES, "model.safetensors": b"newer weights"})
    requests = len(hub.requests)
    offline = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_OFFLINE": "1"}
    assert client.resolve(NAME)["folder"] == client.resolve(NAME, **offline)["folder"] == folder
    assert len(hub.requests) == requests
    pulled = client.call("pull", NAME, client.home / "data")["folder"]
    assert content_of(pulled)["model.safetensors"] == b"newer weights"
    assert client.resolve(NAME, **offline)["folder"] == pulled
    assert content_of(folder)["model.safetensors"] == FILES["model.safetensors"], "the lineage's files must stay"


def test_a_commit_a_branch_and_a_tag_are_revisions(hub: FakeHub, client: Client) -> None:
    commit = hub.repositories[NAME].branches["main"]
    hub.repositories[NAME].commit({**FILES, "tokenizer.json": b'{"v": 2}'}, "release/v2")
    assert content_of(client.resolve(f"{NAME}@release/v2")["folder"])["tokenizer.json"] == b'{"v": 2}'
    assert client.resolve(f"{NAME}@{commit}")["folder"].endswith(commit)


def test_only_shards_of_the_index_are_fetched(hub: FakeHub, client: Client) -> None:
    shards = {f"model-0000{part}-of-00002.safetensors": bytes([part]) * 50 for part in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    small_files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    expected = {**small_files, **shards, "model.safetensors.index.json": index.encode()}
    hub.repositories[NAME].commit({**expected, "consolidated.safetensors": b"the same weights"})
    assert set(content_of(client.resolve(NAME)["folder"])) == {*expected, ORIGIN_FILE}


def test_an_index_that_maps_no_weights_to_files_is_refused(hub: FakeHub, client: Client) -> None:
    weights = {"model-00001-of-00001.safetensors": b"weights"}
    small_files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    indexes = (b"", b"[]", b"{}", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": [1]}}', b"[" * 100_000, b"\xff")
    for index in indexes:
        hub.repositories[NAME] = HubRepository()
        hub.repositories[NAME].commit({**small_files, **weights, "model.safetensors.index.json": index})
        refused = client.resolve(NAME)
        assert refused.get("kind") == "SettingError", index[:50]
        assert "does not map weights to files" in refused["error"], index[:50]


def test_a_commit_that_is_no_digest_becomes_no_folder(hub: FakeHub, client: Client) -> None:
    repository = hub.repositories[NAME]
    for commit in ("../../elsewhere", "main", "a" * 41, ""):
        repository.commits[commit] = dict(FILES)
        repository.branches["main"] = commit
        refused = client.resolve(NAME)
        assert refused.get("kind") == "SettingError", commit
        assert "the hub answers with the commit" in refused["error"], commit


def test_a_folder_has_precedence_over_the_hub(hub: FakeHub, client: Client) -> None:
    folder = client.home / NAME
    folder.mkdir(parents=True)
    assert client.resolve(NAME) == {"folder": NAME}
    assert hub.requests == []


def test_a_private_model_needs_the_token(hub: FakeHub, client: Client) -> None:
    hub.repositories[NAME].required_token = "hf_right"
    refused = client.resolve(NAME)
    assert refused["kind"] == "SettingError"
    assert "HF_TOKEN" in refused["error"]
    assert "folder" in client.resolve(NAME, HF_TOKEN="hf_right")


def test_refusals_name_value_and_remedy(hub: FakeHub, client: Client) -> None:
    missing, revision = client.resolve("acme/typo"), client.resolve(f"{NAME}@no-such-branch")
    assert "neither a folder nor a model of the hub" in missing["error"]
    assert "org/name" in missing["error"]
    assert "no revision 'no-such-branch'" in revision["error"]
    hub.repositories["acme/pickles"] = HubRepository()
    hub.repositories["acme/pickles"].commit({"pytorch_model.bin": b"pickle", "config.json": b"{}"})
    assert "no weights in safetensors" in client.resolve("acme/pickles")["error"]
    hub.repositories[NAME].gated = True
    assert "licence" in client.resolve(NAME)["error"]
    assert "is not a folder" in client.resolve("models")["error"]
    assert {missing["kind"], revision["kind"]} == {"SettingError"}


def test_a_silent_hub_can_be_tried_again(client: Client) -> None:
    silent = client.resolve(NAME, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert silent["kind"] == "Unavailable"
    assert "HF_ENDPOINT" in silent["error"]


def test_damaged_weights_are_refused_and_fetched_again(hub: FakeHub, client: Client) -> None:
    hub.damaged.add("model.safetensors")
    assert "differs from its digest" in client.resolve(NAME)["error"]
    hub.damaged.clear()
    assert content_of(client.resolve(NAME)["folder"])["model.safetensors"] == FILES["model.safetensors"]


def test_a_pushed_version_comes_back_byte_for_byte(hub: FakeHub, client: Client) -> None:
    version = client.home / "version"
    version.mkdir()
    for path, data in FILES.items():
        (version / path).write_bytes(data)
    refused = client.call("push", "acme/new", version)
    assert "HF_TOKEN" in refused["error"]
    commit = client.call("push", "acme/new", version, HF_TOKEN="hf_any")["folder"]
    fetched = dict(content_of(client.resolve(f"acme/new@{commit}")["folder"]))
    assert json.loads(fetched.pop(ORIGIN_FILE))["commit"] == commit
    assert fetched == FILES


@pytest.mark.parametrize(
    "text",
    [
        "models", "a/b/c", "/abs/path", "../up/x", "a/..", "a/b@", "a b/c", "", "a/b@../x", "a--b/c", "a/b-", "a/b.",
        "a/\u0660",
    ],
)  # fmt: skip
def test_other_texts_name_no_repository(text: str) -> None:
    assert Repository.parse(text) is None


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "a/b@main", "a/b@refs/pr/3", "org/na.me_x@" + "a" * 40])
def test_a_repository_is_printed_as_it_was_named(text: str) -> None:
    assert str(Repository.parse(text)) == text.removesuffix("@main")
