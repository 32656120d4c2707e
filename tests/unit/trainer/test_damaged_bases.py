"""Tests of damaged base models: the trainer's check and the registration both name the problem.

Architectures with special code are supported as docs/models.md claims; `make check NAME=architectures` checks all of
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.errors import VersionUnusable
from headrace_inference.importing import Importer
from headrace_inference.settings import InferenceSettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.model_folder import find_folder_problems
from headrace_schemas.programs.models import FolderLine
from headrace_trainer.check import check
from headrace_trainer.settings import TrainerSettings
from tests.architectures.catalog import CATALOG, Architecture
from tests.architectures.program import table, try_architecture, verdicts, written
from tests.support import tiny_model

Damage = Callable[[Path], None]


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
    monkeypatch.setattr("headrace_trainer.torch_learner.native.examine", lambda _: pytest.fail("the base was loaded"))
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
