"""Tests of base folders with odd values: each is a problem by name or no problem, and never an error of the check."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.model_folder import find_folder_problems, stored_tensors
from headrace_trainer.check import check, suggest
from headrace_trainer.lineage.versions import check_base
from headrace_trainer.settings import TrainerSettings

ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "\x1b[31m",
    [],
    [1],
    {},
    {"a": 1},
]
SIZES = ("num_hidden_layers", "hidden_size", "head_dim", "num_key_value_heads", "max_position_embeddings", "vocab_size")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "base")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def write_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))


@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes_in_a_configuration_are_no_error(name: str, folder: Path) -> None:
    for value in ODD_VALUES:
        change(folder / "config.json", **{name: value})
        list(find_folder_problems(folder))
        suggest(Common(), TrainerSettings.model_validate({"base": str(folder)}))


def test_odd_tokens_and_shards_are_no_error(folder: Path) -> None:
    for value in [*ODD_VALUES, [{"content": ["a"], "id": 3}], [{"content": "a", "id": 10**30}]]:
        change(folder / "tokenizer.json", added_tokens=value)
        list(find_folder_problems(folder))
    index = folder / "model.safetensors.index.json"
    for value in [*ODD_VALUES, {"a": [1], "b": 2, "c": "x"}, {"a": "\x00"}, {"a": "y" * 5000}]:
        index.write_text(json.dumps({"weight_map": value}), encoding="utf-8")
        list(find_folder_problems(folder))


@pytest.mark.parametrize("shape", [["2"], [-1], [1.5], [True], [2**60], [None], 7, None])
@pytest.mark.parametrize("offsets", [[0, 8]])
def test_a_tensor_of_an_odd_shape_is_named(shape: Any, offsets: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    write_header(path, json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode())
    with pytest.raises(ValueError, match="its header is not valid"):
        stored_tensors(path)
    assert any("its header is not valid" in problem for problem in find_folder_problems(folder))
    assert suggest(Common(), TrainerSettings.model_validate({"base": str(folder)})) == {}


@pytest.mark.parametrize("offsets", [[-8, 8], [0], ["0", "8"], [0.5, 8], None])
def test_a_tensor_at_an_odd_position_is_named(offsets: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    write_header(path, json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode())
    assert any("its header is not valid" in problem for problem in find_folder_problems(folder))


def test_a_header_that_is_nested_too_deeply_is_named(folder: Path) -> None:
    write_header(folder / "model.safetensors", b"[" * 100_000)
    assert any("nested too deeply" in problem for problem in find_folder_problems(folder))


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def device(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to("/dev/zero")


def link_outside(folder: Path) -> None:
    secret = folder.parent / "id_ed25519"
    secret.write_text("a private key", encoding="utf-8")
    (folder / "notes.txt").symlink_to(secret)


def dangling_weights(folder: Path) -> None:
    (folder / "model-2.safetensors").symlink_to(folder / "nowhere")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (pipe, "config.json is not a file"),
        (device, "generation_config.json is not a file"),
        (link_outside, "notes.txt is a link to a file outside of the folder"),
        (dangling_weights, "model-2.safetensors is not a file"),
    ],
)
async def test_a_file_that_is_none_of_the_folder_is_named_and_not_read(
    damage: Callable[[Path], None], problem: str, folder: Path
) -> None:
    damage(folder)
    messages = await check(Common(), TrainerSettings.model_validate({"base": str(folder)}))
    assert len(messages) == 1
    assert problem in messages[0]
    with pytest.raises(SettingError, match=problem):
        check_base(folder)


def test_links_of_a_hub_s_cache_and_links_to_weights_are_files(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert list(find_folder_problems(snapshot)) == []
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    assert list(find_folder_problems(folder)) == []


async def test_a_tokenizer_that_ends_its_library_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    change(path, model=model | {"continuing_subword_prefix": "\x00\x1b[31m"})
    messages = await check(Common(), TrainerSettings.model_validate({"base": str(folder)}))
    assert any("tokenizer.json cannot be used" in message for message in messages)
