"""Tests of the import of model folders, and of damaged blobs in the store.

A folder that is not a valid version is refused with a reason, and nothing of it is stored. A replica refuses hundreds
of damaged blobs by name, and never serves them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.errors import UnknownVersion, VersionUnusable
from headrace_inference.importer import Importer, merge_adapter
from headrace_inference.settings import InferenceSettings
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ServedVersion
from headrace_schemas.programs import MANIFEST_FILE, FolderLine, StoredLine
from headrace_schemas.values.blobs import BlobRef, Manifest
from tests.support import tiny_model
from tests.unit.inference.conftest import Models, Stored
from tests.unit.inference.test_fleet import Rig

Change = Callable[[Path], object]


@pytest.fixture
def importer(models: Models) -> Importer:
    return Importer(models.blobs, InferenceSettings())


def take(importer: Importer, folder: Path, **how: object) -> StoredLine:
    return importer.import_folder(FolderLine.model_validate({"folder": str(folder), "name": "opponent", **how}))


def manifest(models: Models, stored: StoredLine) -> Manifest:
    return versions.read_manifest(models.blobs, stored.manifest)


def test_a_folder_becomes_a_version(importer: Importer, models: Models) -> None:
    stored = take(importer, models.first.folder)
    stored_manifest = manifest(models, stored)
    assert stored_manifest.version == stored.version
    assert (stored_manifest.name, stored_manifest.lineage, stored_manifest.parent) == ("opponent", "registered", None)
    assert {file.path: file.blob.sha256 for file in stored_manifest.files} == {
        file.path: file.blob.sha256 for file in models.first.manifest.files
    }
    answered = tiny_model.answers(models.first.folder, stored_manifest.fingerprint)
    assert stored_manifest.fingerprint.logprobs == pytest.approx(answered, abs=1e-4)
    assert take(importer, models.first.folder).version == stored.version, "the same files are the same version"


def test_an_adapter_becomes_a_version_of_its_base(importer: Importer, models: Models) -> None:
    base = models.first
    stored = take(importer, models.adapter.folder, base=base.served.manifest)
    stored_manifest = manifest(models, stored)
    assert (stored_manifest.kind, stored_manifest.base) == ("lora", base.version)
    assert stored_manifest.tokenizer_sha256 == base.manifest.tokenizer_sha256
    answered = tiny_model.answers(models.adapter.folder, stored_manifest.fingerprint, base=base.folder)
    assert stored_manifest.fingerprint.logprobs == pytest.approx(answered, abs=1e-4)


def _config(**changes: object) -> Change:
    return _json("config.json", **changes)


def _json(name: str, **changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _weights(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        tensor = new(tensors.pop(name))
        save_file(tensors if tensor is None else tensors | {name: tensor}, path, metadata={"format": "pt"})

    return change


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def _no_template(folder: Path) -> None:
    for path in folder.glob("*.jinja"):
        path.unlink()
    _json("tokenizer_config.json", chat_template=None)(folder)


def _template(text: str) -> Change:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def _larger_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    config = json.loads(path.read_text())
    last = max(config["model"]["vocab"].values())
    config["added_tokens"].append({**config["added_tokens"][0], "id": last + 500, "content": "<|foreign|>"})
    config["model"]["vocab"]["zzzz"] = last + 499
    path.write_text(json.dumps(config))


FAULTS: dict[str, tuple[Change, str]] = {
    "no weights": (_remove("model.safetensors"), "no weights in safetensors"),
    "no config": (_remove("config.json"), "no config.json"),
    "no tokenizer": (_remove("tokenizer.json"), "no tokenizer.json"),
    "a pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "no weights"),
    "no template": (_no_template, "chat template"),
    "a template that fails": (_template("{{ raise_exception('never') }}"), "template"),
    "a template that is none": (_template("{% for %}"), "emplate"),
    "a foreign tokenizer": (_larger_tokenizer, "has no row in the embedding"),
    "a missing tensor": (_weights("model.norm.weight", lambda _: None), "missing_keys"),
    "a reshaped tensor": (_weights("model.norm.weight", lambda w: w[:4].clone()), ""),
    "not a number": (_weights("model.norm.weight", lambda w: w * float("nan")), "contains NaN or infinity"),
    "an unknown architecture": (_config(model_type="no_such_model"), "no_such_model"),
    "sliding attention": (
        _config(layer_types=["full_attention", "sliding_attention"], sliding_window=16),
        "sliding_window",
    ),
    "an unsteady rope": (
        _config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "dynamic",
    ),
    "half a config": (lambda f: (f / "config.json").write_text("{"), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_a_fault_is_refused_by_name(
    importer: Importer, models: Models, tmp_path: Path, fault: str
) -> None:
    change, reason = FAULTS[fault]
    folder = tmp_path / "faulty"
    shutil.copytree(models.first.folder, folder)
    change(folder)
    before = set(models.blobs.digests())
    with pytest.raises(VersionUnusable) as refused:
        take(importer, folder)
    assert reason in str(refused.value)
    assert "faulty" in str(refused.value) or "opponent@" in str(refused.value)
    assert set(models.blobs.digests()) == before, "nothing of it is stored"


ADAPTER_FAULTS: dict[str, tuple[Change, str]] = {
    "of another version": (_json("adapter_config.json", base_model_name_or_path="tiny@0123456789abcdef"), "tiny@0123"),
    "of other modules": (_json("adapter_config.json", target_modules=["k_proj"]), "adapter"),
    "half of it": (
        _weights("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", lambda _: None),
        "has no base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ),
    "of a wider base": (
        _weights(
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            lambda w: torch.cat([w, w], 1).contiguous(),
        ),
        "lora_A",
    ),
    "another rank": (_json("adapter_config.json", r=2), ""),
    "not applied": (
        lambda folder: (
            [
                _weights(name, torch.zeros_like)(folder)
                for name in load_file(folder / "adapter_model.safetensors")
                if "lora_B" in name
            ]
        ),
        "does not change the logprobs",
    ),
    "another kind": (_json("adapter_config.json", peft_type="IA3", task_type="CAUSAL_LM"), ""),
    "half a config": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read"),
    "another tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is not that of"),
    "another template": (lambda f: (f / "chat_template.jinja").write_text("x"), "template is not that of"),
}


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_an_adapter_with_a_fault_is_refused_by_name(
    importer: Importer, models: Models, tmp_path: Path, fault: str
) -> None:
    change, reason = ADAPTER_FAULTS[fault]
    folder = tmp_path / "faulty"
    shutil.copytree(models.adapter.folder, folder)
    change(folder)
    with pytest.raises(VersionUnusable) as refused:
        take(importer, folder, base=models.first.served.manifest)
    assert reason in str(refused.value)


def test_an_adapter_of_a_deeper_base_is_refused(importer: Importer, models: Models, tmp_path: Path) -> None:
    deeper = tiny_model.build(tmp_path / "deeper", layers=3)
    folder = tiny_model.adapter(deeper, tmp_path / "adapter", seed=3)
    with pytest.raises(VersionUnusable, match="it is an adapter of another base"):
        take(importer, folder, base=models.first.served.manifest)


def test_an_adapter_needs_a_base(importer: Importer, models: Models) -> None:
    with pytest.raises(VersionUnusable, match="name the version that it applies to"):
        take(importer, models.adapter.folder)


def exported(models: Models, folder: Path) -> Path:
    """Write a folder as `headrace models export` does."""
    versions.fetch_version(models.blobs, models.first.manifest, folder)
    (folder / MANIFEST_FILE).write_bytes(models.first.manifest.canonical_json())
    return folder


def test_an_exported_folder_is_the_very_same_version_elsewhere(models: Models, tmp_path: Path) -> None:
    folder = exported(models, tmp_path / "exported")
    elsewhere = BlobStore((tmp_path / "blobs").as_uri())
    stored = Importer(elsewhere, InferenceSettings()).import_folder(FolderLine(folder=str(folder)))
    assert stored.version == models.first.version
    stored_manifest = versions.read_manifest(elsewhere, stored.manifest)
    assert versions.fetch_version(elsewhere, stored_manifest, tmp_path / "again").joinpath("model.safetensors").exists()


def test_weights_are_never_in_memory_as_a_whole_file(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read_bytes = exported(models, tmp_path / "exported"), Path.read_bytes
    elsewhere = BlobStore((tmp_path / "blobs").as_uri())
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path.suffix == ".safetensors" else read_bytes(path))
    for name in (None, "opponent"):
        Importer(elsewhere, InferenceSettings()).import_folder(FolderLine(folder=str(folder), name=name))
        assert all(elsewhere.holds(file.blob) for file in models.first.manifest.files)


def flips(folder: Path, chance: random.Random, count: int) -> Iterator[tuple[Path, int, int]]:
    """Yield the file, offset and bit of `count` faults, spread over all files."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE and path.stat().st_size)
    for number in range(count):
        path = files[number % len(files)]
        yield path, chance.randrange(path.stat().st_size), 1 << chance.randrange(8)


def test_flipped_bytes_of_an_exported_folder_are_refused_by_name(models: Models, tmp_path: Path) -> None:
    """Flip 300 single bits, spread over all files."""
    print(f"seed {(seed := random.randrange(2**32))}")
    folder = exported(models, tmp_path / "exported")
    elsewhere = BlobStore((tmp_path / "blobs").as_uri())
    importer = Importer(elsewhere, InferenceSettings())
    for path, offset, bit in flips(folder, random.Random(seed), 300):
        content = path.read_bytes()
        path.write_bytes(content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :])
        with pytest.raises(VersionUnusable, match=f"{path.name} is not the file that was exported"):
            importer.import_folder(FolderLine(folder=str(folder)))
        path.write_bytes(content)
    assert list(elsewhere.digests()) == [], "nothing of them is stored"


def test_merged_answers_as_unmerged(models: Models, tmp_path: Path) -> None:
    """The logits agree within float tolerance, computed with transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "merged"
    merge_adapter(models.blobs, models.adapter.served.manifest, models.first.served.manifest, target)
    plain = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32)
    unmerged = PeftModel.from_pretrained(plain, str(models.adapter.folder)).eval()
    merged, info = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), "every tensor has its place"
    tokens = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (merged.eval()(tokens).logits - unmerged(tokens).logits).abs().max()
    assert float(difference) < 1e-4
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32).eval()(tokens).logits
        assert float((merged(tokens).logits - base).abs().max()) > 1e-2, "and otherwise than the base"
    before = AutoTokenizer.from_pretrained(models.first.folder)
    messages = [{"role": "user", "content": "Who sent the mail?"}]
    after = AutoTokenizer.from_pretrained(target)
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)


def test_only_an_adapter_of_this_base_is_merged_into_it(models: Models, tmp_path: Path) -> None:
    with pytest.raises(VersionUnusable, match=f"{models.adapter.version} is an adapter of {models.first.version}"):
        merge_adapter(models.blobs, models.adapter.served.manifest, models.second.served.manifest, tmp_path / "merged")


def test_what_is_exported_is_loaded_by_transformers_and_peft(models: Models, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    full = versions.fetch_version(models.blobs, models.first.manifest, tmp_path / "full")
    lora = versions.fetch_version(models.blobs, models.adapter.manifest, tmp_path / "lora")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32), str(lora))
    tokens = models.adapter.manifest.fingerprint
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens.token_ids])).logits[0, :-1].log_softmax(-1)
    logprobs = logits.gather(1, torch.tensor(tokens.token_ids)[1:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(tokens.logprobs, abs=1e-4)


FLIPS = 240


@pytest.fixture
def rig(models: Models, tmp_path: Path) -> Rig:
    return Rig(models, tmp_path / "cache", versions_max=8)


def damages(chance: random.Random, stored: Stored) -> Iterator[tuple[BlobRef, int, int]]:
    """Yield the blob, offset and bit of faults in the manifest and in every file in turn."""
    blobs = [stored.served.manifest, *(file.blob for file in stored.manifest.files)]
    blobs = [blob for blob in blobs if blob.size]
    while True:
        for blob in blobs:
            yield blob, chance.randrange(blob.size), 1 << chance.randrange(8)


async def refused(rig: Rig, served: ServedVersion, *other_versions: ServedVersion) -> str:
    """Return the reason why the replica does not serve `served`."""
    rig.route(served, *other_versions)
    await rig.until(lambda: rig.states.get(served.version) == "failed")
    reason = rig.error(served)
    with pytest.raises(UnknownVersion):
        rig.fleet.find_version(served.version)
    assert served.version not in rig.engine.held
    rig.route(*other_versions)
    await rig.until(lambda: served.version not in rig.states)
    return reason


async def test_flipped_bytes_in_the_store(rig: Rig, models: Models) -> None:
    """Flip bits of the manifest and of every file, for a complete version and for an adapter."""
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
    """Flip one bit of a stored blob inside the context."""
    path = Path(blobs._path(blob.sha256))
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes([content[offset] ^ bit]) + content[offset + 1 :])
    yield
    path.write_bytes(content)


def changed(models: Models, stored: Stored, **fields: object) -> ServedVersion:
    """Return a version whose manifest differs from `stored` in `fields`, and so has another name."""
    manifest = Manifest.model_validate({**stored.manifest.model_dump(), **fields})
    return ServedVersion(version=manifest.version, manifest=models.blobs.put(manifest.canonical_json()))


@pytest.mark.parametrize("number", range(20))
async def test_a_version_with_anothers_tokens_is_not_served_beside_it(rig: Rig, models: Models, number: int) -> None:
    """All versions of a model share one tokenizer and one chat template."""
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
