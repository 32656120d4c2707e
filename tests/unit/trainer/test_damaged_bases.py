"""Kinds of damaged bases: the trainer's check and the adoption of a base both name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.errors import VersionUnusable
from headrace_inference.importing.folder import Importer
from headrace_inference.settings import InferenceSettings
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import SettingError
from headrace_runtime.settings import Common
from headrace_schemas.importing import FolderLine
from headrace_trainer.check import check
from headrace_trainer.settings import TrainerSettings
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


NORM, LAYER = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing norm": (tensors(lambda weights: weights.pop(NORM)), NORM),
    "missing matrix": (tensors(lambda weights: weights.pop(LAYER)), "mlp.up_proj"),
    "unexpected tensor": (tensors(lambda weights: weights.update({"model.extra.w": torch.ones(3)})), "model.extra"),
    "mismatched shape": (tensors(lambda weights: weights.update({NORM: torch.ones(7)})), "norm"),
    "NaN": (spoil(LAYER, float("nan")), f"{LAYER} holds NaN"),
    "infinity": (spoil(NORM, float("inf")), f"{NORM} holds NaN or infinity"),
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
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_damaged_base_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    damage, words = DAMAGES[kind]
    base = tiny_model.build(tmp_path / "base")
    damage(base)
    try:
        said = await check(Common(), TrainerSettings.model_validate({"base": str(base), "compute": {"device": "cpu"}}))
    except SettingError as error:
        said = [str(error)]
    assert any(words in line for line in said), said
    assert not any("padded" in line for line in said), "packing is no remedy for damage"
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    with pytest.raises(VersionUnusable) as refused:
        Importer(blobs, InferenceSettings()).take(FolderLine(folder=str(base), name="base"))
    assert words in str(refused.value), refused.value


async def test_a_sound_base_has_no_problems(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    settings = TrainerSettings.model_validate({"base": str(base), "compute": {"device": "cpu"}})
    assert await check(Common(), settings) == []
