"""Tests that a step shared by several ranks moves the weights as one process does.

The ranks are threads here; `make check NAME=ray` tests processes. The passes of a step are assigned to ranks. Ranks
that write their own shards produce the file that one process writes, and an incomplete file is detected.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from headrace_trainer.batches.batch import Batch, Row, pack
from headrace_trainer.learner import LearnerLost, NotFinite, StepResult
from headrace_trainer.ray_learner import rank_learner, version_parts
from headrace_trainer.ray_learner.pieces import Piece, check
from headrace_trainer.ray_learner.rank_learner import _merge, assign_passes, pass_budget
from headrace_trainer.ray_learner.version_parts import OwnPart, _entries
from headrace_trainer.settings import ComputeSettings, LoraSettings, TrainerSettings
from headrace_trainer.torch_learner import version_files
from headrace_trainer.torch_learner.learner import TorchLearner, open_learner
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model.masters import round_stochastically
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.step import Team, train
from headrace_trainer.torch_learner.stored_tensors import SelectedTensors, StoredTensors, layout
from tests.unit.trainer.world import experience

GOING_ON = threading.Event()
_SAME = 1e-6


class Threads:
    """Exchange of values between the threads of one team."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._brought: list[Any] = [None] * count

    def exchange(self, number: int, value: Any) -> list[Any]:
        self._brought[number] = value
        self._barrier.wait()
        values = list(self._brought)
        self._barrier.wait()
        return values


class Member:
    """`Team` without torch.distributed. If `equal`, each rank has the same number of passes, as with sharded
    weights."""

    def __init__(self, threads: Threads, number: int, *, equal: bool = False) -> None:
        self.threads = threads
        self.number = number
        self.equal = equal

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return rank_learner.pass_budget(lengths, pack_tokens, self.threads.count)

    def own_passes(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        hands = rank_learner.assign_passes(packs, lengths, self.threads.count)
        own_packs = [packs[index] for index in hands[self.number]]
        return own_packs + [[]] * (max(map(len, hands)) - len(own_packs) if self.equal else 0)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        own_gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        every = self.threads.exchange(self.number, own_gradients)
        for name in {name for gradients in every for name in gradients}:
            parameters[name].grad = torch.stack(
                [member_gradients[name] for member_gradients in every if name in member_gradients]
            ).sum(0)

    def merge_measures(self, measures: Measures) -> Measures:
        return _merge(self.threads.exchange(self.number, measures))


class EachForItself(Member):
    """Faulty member that ignores the gradients of the others."""

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.threads.exchange(self.number, None)


def settings_of(base: Path, **more: Any) -> TrainerSettings:
    table = {"base": str(base), "optimizer": {"learning_rate": 1e-3}, "native": {"tokens": 0}}
    return TrainerSettings.model_validate({**table, **more})


def batches(version: str = "m@0123456789abcdef") -> list[Batch]:
    """Return batches of rows of several lengths, with corrections, and one batch smaller than the team."""

    def row(number: int, advantage: float, weight: float | None = None) -> Row:
        return Row.of(experience(number, version, length=10 + 5 * (number % 4)), advantage, version, weight)

    return [
        Batch(tuple(row(n, 0.5 - n % 3) for n in range(7))),
        Batch((row(7, 1.0), row(8, -1.0), row(0, 0.7, 0.02), row(9, 0.5)), full_rows=7),
        Batch((row(10, 1.0),), full_rows=7),
        Batch((row(1, -0.4, 0.02),), full_rows=7),
    ]


def play(learner: TorchLearner, settings: TrainerSettings, team: Team) -> list[StepResult]:
    outcomes = []
    for batch in batches():
        tokens = learner.policy.pack_tokens
        outcomes.append(train(learner.policy, learner.optimizer, batch, settings.loss, tokens, GOING_ON, team=team))
    return outcomes


def of_members(
    base: Path, settings: TrainerSettings, make: Callable[[Threads, int], Team], count: int
) -> list[tuple[dict[str, torch.Tensor], list[StepResult]]]:
    threads = Threads(count)
    learners = [open_learner(base, settings, Policy) for _ in range(count)]

    def run_member(number: int) -> tuple[dict[str, torch.Tensor], list[StepResult]]:
        results = play(learners[number], settings, make(threads, number))
        return learners[number].policy.tensors(), results

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_member, range(count)))


def apart(weights: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert weights.keys() == other.keys()
    return max(float((weights[name] - other[name]).abs().max()) for name in weights)


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"lora": {"rank": 2}},
    "two updates and the base": {"loss": {"updates_per_step": 2, "kl": 0.05}},
    "sequences left out": {"loss": {"sequence_mask_max": 1.5}},
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_team_moves_the_weights_as_one_process_does(base: Path, name: str, equal: bool) -> None:
    settings = settings_of(base, **CASES[name])
    alone = open_learner(base, settings, Policy)
    expected = _alone(alone, settings)
    results = of_members(base, settings, lambda threads, number: Member(threads, number, equal=equal), 3)
    for weights, member_results in results:
        assert apart(weights, alone.policy.tensors()) < _SAME
        for result, expected_result in zip(member_results, expected, strict=True):
            assert result.left_out == expected_result.left_out
            for measure in expected_result.measured.keys() - {"step_seconds", "tokens_per_second"}:
                assert result.measured[measure] == pytest.approx(
                    expected_result.measured[measure], rel=1e-4, abs=1e-5
                ), measure
    assert apart(results[0][0], results[1][0]) == 0.0, "every member has the same weights"


def _alone(learner: TorchLearner, settings: TrainerSettings) -> list[StepResult]:
    from headrace_trainer.torch_learner.step import SINGLE_PROCESS

    return play(learner, settings, SINGLE_PROCESS)


def test_members_that_do_not_add_up_are_noticed(base: Path) -> None:
    settings = settings_of(base)
    alone = open_learner(base, settings, Policy)
    _alone(alone, settings)
    results = of_members(base, settings, EachForItself, 2)
    assert apart(results[0][0], alone.policy.tensors()) > 100 * _SAME


def test_what_is_not_finite_in_one_member_is_so_in_all(base: Path) -> None:
    settings = settings_of(base)
    threads = Threads(2)
    rows = tuple(Row.of(experience(n, "m@0123456789abcdef"), float("nan") if n == 0 else 1.0, None) for n in range(4))

    learners = [
        open_learner(base, settings, Policy) for _ in range(2)
    ]  # one after the other: loading is for one thread

    def is_refused(number: int) -> bool:
        learner = learners[number]
        before = learner.freeze()
        tokens, team = learner.policy.pack_tokens, Member(threads, number)
        with pytest.raises(NotFinite):
            train(learner.policy, learner.optimizer, Batch(rows), settings.loss, tokens, GOING_ON, team=team)
        return learner.freeze() == before

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(is_refused, range(2))) == [True, True]


LENGTHS = st.lists(st.integers(1, 60), max_size=24)


def test_the_longest_goes_first_and_to_whoever_has_least() -> None:
    assert assign_passes([[0], [1], [2], [3]], [5, 9, 4, 1], 2) == [[1, 3], [0, 2]]


def test_equal_passes_go_in_turn() -> None:
    assert assign_passes([[0], [1], [2]], [7, 7, 7], 2) == [[0, 2], [1]]


def test_nothing_is_dealt_to_everybody() -> None:
    assert assign_passes([], [], 3) == [[], [], []]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_each_row_is_trained_once_whoever_it_goes_to(lengths: list[int], ranks: int, pack_tokens: int) -> None:
    packs = pack(lengths, pass_budget(lengths, pack_tokens, ranks))
    hands = assign_passes(packs, lengths, ranks)
    assert len(hands) == ranks
    assert sorted(row for hand in hands for number in hand for row in packs[number]) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_a_pass_that_holds_several_rows_stays_within_both_bounds(
    lengths: list[int], ranks: int, pack_tokens: int
) -> None:
    bound = pass_budget(lengths, pack_tokens, ranks)
    assert 1 <= bound <= pack_tokens
    for rows in pack(lengths, bound):
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= bound


@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 2), (4, 4)])
def test_a_small_batch_has_a_pass_for_each_rank(ranks: int, passes: int) -> None:
    lengths = [10] * 8
    packs = pack(lengths, pass_budget(lengths, 4096, ranks))
    assert len(packs) == passes
    assert [len(hand) for hand in assign_passes(packs, lengths, ranks)] == [1] * ranks


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
    """Return the rows of `tensor` for `rank` as FSDP2 divides them. Tensors without rows belong to the first rank."""
    if tensor.ndim == 0:
        return OwnPart(tensor, 0) if rank == 0 else None
    each = -(-len(tensor) // ranks)
    start = min(rank * each, len(tensor))
    return OwnPart(tensor[start : start + each], start * (tensor.numel() // max(1, len(tensor))))


def written(folder: Path, tensors: dict[str, Tensor], ranks: int) -> tuple[Path, list[Piece]]:
    pieces: list[Piece] = []
    for rank in range(ranks):
        own_parts = {name: cut(tensor, rank, ranks) for name, tensor in tensors.items()}
        size, mine = version_parts.compute_ranges("one.safetensors", tensors, own_parts, ABOUT, first=rank == 0)
        if rank == 0:
            (folder / "one.safetensors").write_bytes(bytes(size))
        pieces += version_parts.write(folder, mine)
    check(folder, {"one.safetensors": size}, pieces)
    return folder / "one.safetensors", pieces


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_write_the_file_of_one_process(
    tmp_path: Path, seed: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_parts, "PIECE_BYTES", 16)
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
