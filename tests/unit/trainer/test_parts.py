"""Ranks that write their own parts make the file that one process writes, and a file that is not whole is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from headrace_trainer.learner import LearnerLost
from headrace_trainer.ray_learner import parts
from headrace_trainer.ray_learner.parts import OwnPart
from headrace_trainer.ray_learner.pieces import Piece, check
from headrace_trainer.ray_learner.version_parts import _entries
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner import version_files
from headrace_trainer.torch_learner.layout import layout
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.rounding import round_stochastically
from headrace_trainer.torch_learner.stored_tensors import SelectedTensors, StoredTensors

ABOUT = {"headrace": "training state of lineage é"}
KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def random_tensors(seed: int) -> dict[str, Tensor]:
    draw = random.Random(seed)
    shapes = [(), (0, 3), (1,), (5,), (7, 3), (2, 3, 4), (16, 2)]
    return {
        f'model.{draw.random()}.{number}"ö': torch.randint(0, 200, draw.choice(shapes)).to(draw.choice(KINDS))
        for number in range(draw.randrange(1, 12))
    }


def cut(tensor: Tensor, rank: int, ranks: int) -> OwnPart | None:
    """Divide by rows, as FSDP2 does; the first rank has tensors without rows."""
    if tensor.ndim == 0:
        return OwnPart(tensor, 0) if rank == 0 else None
    each = -(-len(tensor) // ranks)
    start = min(rank * each, len(tensor))
    return OwnPart(tensor[start : start + each], start * (tensor.numel() // max(1, len(tensor))))


def written(folder: Path, tensors: dict[str, Tensor], ranks: int) -> tuple[Path, list[Piece]]:
    pieces: list[Piece] = []
    for rank in range(ranks):
        own_parts = {name: cut(tensor, rank, ranks) for name, tensor in tensors.items()}
        size, mine = parts.ranges("one.safetensors", tensors, own_parts, ABOUT, first=rank == 0)
        if rank == 0:
            (folder / "one.safetensors").write_bytes(bytes(size))
        pieces += parts.write(folder, mine)
    check(folder, {"one.safetensors": size}, pieces)
    return folder / "one.safetensors", pieces


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_write_the_file_of_one_process(
    tmp_path: Path, seed: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PIECE_BYTES", 16)
    tensors = random_tensors(seed)
    path, _ = written(tmp_path, tensors, ranks)
    assert path.read_bytes() == save(tensors, metadata=ABOUT)
    read = StoredTensors(path)
    assert sorted(read) == sorted(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert "nobody" not in read
    some = SelectedTensors(read, [name for name in read if name.endswith('"ö')], "model.")
    assert all(torch.equal(some[name], tensors[f"model.{name}"]) for name in some)


def test_a_layout_needs_no_values(tmp_path: Path) -> None:
    tensors = random_tensors(3)
    bare = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    assert layout(bare, ABOUT) == layout(tensors, ABOUT)


Fault = Callable[[list[Piece]], list[Piece]]
FAULTS: dict[str, Fault] = {
    "one is missing": lambda pieces: pieces[:3] + pieces[4:],
    "the last is missing": lambda pieces: pieces[:-1],
    "one is there twice": lambda pieces: [*pieces, pieces[2]],
    "one is of another copy": lambda pieces: [replace(pieces[0], crc32=pieces[0].crc32 ^ 1), *pieces[1:]],
    "one is of another file": lambda pieces: [*pieces[1:], replace(pieces[0], file="two.safetensors")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_is_not_there_is_noticed(tmp_path: Path, fault: str) -> None:
    path, pieces = written(tmp_path, random_tensors(5), 2)
    assert len(pieces) > 4
    with pytest.raises(LearnerLost, match=r"not written .* completely"):
        check(tmp_path, {path.name: path.stat().st_size}, FAULTS[fault](sorted(pieces)))


@pytest.mark.parametrize("damage", ["torn", "cut off"])
def test_a_rank_that_died_while_it_wrote_is_noticed(tmp_path: Path, damage: str) -> None:
    """The check reads the content of the file, whatever a rank has reported."""
    path, pieces = written(tmp_path, {"a": torch.arange(100.0), "b": torch.ones(100)}, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes(40) if damage == "torn" else content[:-40])
    with pytest.raises(LearnerLost, match=r"not written .* completely"):
        check(tmp_path, {path.name: len(content)}, pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_part_is_rounded_as_the_whole_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(41, 7)
    owned: Sequence[OwnPart | None] = [cut(tensor, rank, 3) for rank in range(3)]
    rounded_parts = [
        round_stochastically(part.values, dtype, "w", start=part.start) for part in owned if part is not None
    ]
    assert torch.equal(torch.cat(rounded_parts), round_stochastically(tensor, dtype, "w"))


def test_the_library_says_where_each_tensor_goes(base: Path, tmp_path: Path) -> None:
    policy = Policy.open(base, ComputeSettings(), LoraSettings(), 0)
    bare = {name: torch.empty(p.shape, device="meta") for name, p in policy.parameters.items()}
    plan = version_files.plan_files(policy, bare)
    files = _entries(plan, bare)
    assert files is not None
    version_files.save_weights(policy, tmp_path, policy.tensors())
    assert {path.name for path in tmp_path.iterdir()} == files.keys() | plan.texts.keys()
    for name, entries in files.items():
        stored = StoredTensors(tmp_path / name)
        assert set(stored) == set(entries)
        assert all(torch.equal(stored[key], policy.parameters[str(entry.name)]) for key, entry in entries.items())


def test_tensors_that_a_file_holds_in_another_form_are_not_cut(base: Path) -> None:
    policy = Policy.open(base, ComputeSettings(), LoraSettings(), 0)
    bare = {name: torch.empty(p.shape, device="meta") for name, p in policy.parameters.items()}
    plan = version_files.plan_files(policy, bare)
    (file,) = plan.files
    made_of_ours = {**plan.files[file], "experts.0": torch.empty(3, device="meta")}
    assert _entries(replace(plan, files={file: made_of_ours}), bare) is None
