"""Tests of a row that makes steps fail: it is dropped with a reason, the others are trained, and a replay agrees
(P9)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from headrace_schemas import Experience, PartitionRead, TrainingOutcome
from headrace_schemas.programs import BATCH_HEADER, LEFT_OUT_HEADER, DryRunLine, recorded_batches
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.summary import VALUES_MAX, summarize_steps
from headrace_trainer.learner import LearnerLost, NotFinite, StepResult
from headrace_trainer.lineage import culprits
from headrace_trainer.replay import DryRun
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import learner as learners
from headrace_trainer.torch_learner import step as steps
from headrace_trainer.torch_learner.learner import TorchLearner
from tests.contract.learner.promises import GOING_ON, batch, frozen
from tests.simulation import services
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Bus, World, experience

Failure = Callable[[], Exception]
FAILURES: dict[str, Failure] = {
    "ValueError": lambda: ValueError("expected a tensor of 3 dimensions"),
    "RuntimeError": lambda: RuntimeError("CUDA error: device-side assert triggered"),
    "OverflowError": lambda: OverflowError("int too large to convert to float"),
    "AssertionError": AssertionError,
    "KeyError": lambda: KeyError("row"),
    "text that cannot be encoded": lambda: ValueError("bad \ud83d \0 end"),
    "NotFinite": NotFinite,
}


class Learner(services.RememberingLearner):
    """Learner whose steps fail if they contain rows of certain experiences."""

    def __init__(self, lineage: str, poison: Collection[str], failure: Failure, fails: int | None = None) -> None:
        """Fail `fails` of the steps with rows of `poison`, or all of them if it is None."""
        super().__init__(lineage)
        self._poison = poison
        self._failure = failure
        self._fails = fails
        self.failed = 0

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if any(row.experience_id in self._poison for row in batch.rows) and self.failed != self._fails:
            self.failed += 1
            raise self._failure()
        return super().step(batch, stop, from_base=from_base)


def using(poison: Collection[str], failure: Failure, fails: int | None = None) -> Any:
    backend = Backend(lambda _, settings: Learner(settings.lineage, poison, failure, fails))
    return mock.patch("headrace_trainer.torch_learner.TORCH", backend)


def settings(**more: Any) -> TrainerSettings:
    small = {"batch_experiences": 5, "batch_experiences_min": 1, "batch_wait_s": 30.0, "max_staleness": 3}
    small |= {"steps_per_version": 1, "save_interval_s": 1e-9, "retry_s": 0.5}
    return TrainerSettings.model_validate({"base": str(services.BASE), "model": "m", **small, **more})


def trained_in(world: World) -> set[str]:
    return {name for (name, _), outcome in world.bus.fates.items() if outcome == "trained"}


def replayed(world: World) -> tuple[DryRunLine, Bus]:
    """Return the plan of a replay of all experiences, and the topic that the replay reads."""
    logs = {(r.partition, r.offset): r for r in world.bus.records}
    at: dict[int, int] = {}
    stream: list[tuple[Experience, list[tuple[str, bytes]], list[int]]] = []

    def take(reads: tuple[PartitionRead, ...]) -> None:
        for read in reads:
            offsets = range(at.get(read.partition, 0), read.until)
            events = (Experience.from_json(logs[read.partition, offset].value or b"") for offset in offsets)
            stream.extend((event, [], []) for event in events)
            at[read.partition] = read.until

    for account in world.bus.accounts:
        for record in account.batches:
            take(record.read)
            cut = record.experiences + len(record.left_out)
            stream[-1][1].append((BATCH_HEADER, str(cut).encode()))
            stream[-1][1].extend((LEFT_OUT_HEADER, name.encode()) for name in record.left_out)
            stream[-1][2].append(cut)
        take(account.read)
    dry_run = DryRun(settings(lineage="again", replays="main", cut="recorded"), world.blobs)
    for recorded in recorded_batches(world.bus.accounts):
        dry_run.expect(recorded)
    copy = Bus(partitions=1)
    for event, headers, cuts in stream:
        dry_run.add(event, cuts)
        original = next(published for published in world.bus.records if published.value == event.to_json())
        copy.add("copy", event.to_json(), 0, [*original.headers, *headers])
    return dry_run.end(), copy


def lessons(trainer: Any) -> list[tuple[int, str, float]]:
    return [(lesson.step, lesson.experience_id, lesson.advantage) for lesson in trainer.lineage.learner.lessons]


@pytest.mark.parametrize("seed", range(12))
async def test_the_rows_that_fail_end_by_name_and_a_replay_leaves_them_out_too(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    world, name = World(tmp_path), draw.choice(list(FAILURES))
    rules = settings(steps_per_version=draw.choice((1, 2)), save_beside=draw.random() < 0.5)
    poison = {f"e{n}" for n in draw.sample(range(40), draw.choice((1, 1, 2, 5)))}
    with using(poison, FAILURES[name]):
        await world.run(rules)
        for begin in range(0, 40, 8):
            version = draw.choice([entry.version for entry in world.bus.checkpoints][-2:])
            equal = draw.random() < 0.3
            events = [experience(n, version, reward=1.0 if equal else n % 3, task="t") for n in range(begin, begin + 8)]
            world.bus.produce(*events)
            await world.run(rules, wait_s=rules.batch_wait_s)
        trainer = await world.run(rules)
    verdicts = {entry.experience_id: entry for entry in world.bus.verdicts}
    reasons = {name: verdicts[name].reason for name in poison if verdicts[name].dropped == "invalid"}
    stale = {name for name, entry in verdicts.items() if entry.dropped == "stale"}
    assert set(reasons) | stale >= poison
    text = "the gradient is not finite" if name == "NotFinite" else str(type(FAILURES[name]()).__name__)
    assert all(text in (reason or "") for reason in reasons.values())
    assert trained_in(world) == {f"e{n}" for n in range(40)} - poison - stale, "and each other row is trained"

    recorded = [entry for account in world.bus.accounts for entry in account.batches]
    assert {left for entry in recorded for left in entry.left_out} <= set(reasons)
    plan, world.bus = await asyncio.to_thread(replayed, world)
    assert [entry.digest for entry in plan.batches] == [entry.digest for entry in recorded]
    again = settings(lineage="again", replays="main", topic="copy", until_end=True, cut="recorded",
                     steps_per_version=rules.steps_per_version)  # fmt: skip
    with using((), FAILURES[name]):
        replay = await world.run(again)
    assert [entry.digest for account in world.bus.accounts for entry in account.batches] == [
        entry.digest for entry in recorded
    ]
    assert lessons(replay) == lessons(trainer)


@pytest.mark.parametrize("name", FAILURES)
async def test_a_row_that_is_alone_in_its_batch_ends_by_name(tmp_path: Path, name: str) -> None:
    world, rules = World(tmp_path), settings(batch_experiences=1, max_staleness=9)
    with using({"e0", "e3"}, FAILURES[name]):
        await world.run(rules)
        world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(6)))
        await world.run(rules)
    assert trained_in(world) == {"e1", "e2", "e4", "e5"}
    assert [verdict.dropped for verdict in world.bus.verdicts if verdict.experience_id in ("e0", "e3")] == [
        "invalid"
    ] * 2


async def test_a_learner_that_fails_whatever_it_is_given_drops_nothing(tmp_path: Path) -> None:
    world, everything = World(tmp_path), mock.MagicMock(__contains__=lambda *_: True)
    with using((), ValueError):
        await world.run(settings())
        world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(9)))
    with using(everything, lambda: RuntimeError("no kernel image is available")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no kernel image"):
                await world.trainer(settings()).run()
    assert world.bus.fates == {}
    with using((), ValueError):
        await world.run(settings(), wait_s=30.0)
    assert len(trained_in(world)) == 9, "nothing was lost"


async def test_a_step_without_enough_memory_drops_nothing_and_ends_the_process(tmp_path: Path) -> None:
    world = World(tmp_path)
    with using({"e2"}, MemoryError):
        await world.run(settings())
        world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(5)))
        with pytest.raises(LearnerLost, match="memory does not suffice"):
            await world.trainer(settings()).run()
    assert world.bus.fates == {}
    with using((), MemoryError):
        await world.run(settings(), wait_s=30.0)
    assert trained_in(world) == {f"e{n}" for n in range(5)}, "nothing was lost"


@pytest.mark.parametrize(
    ("failure", "fails"), [(ValueError, 1), (ValueError, 2), (ValueError, 3), (MemoryError, 1), (MemoryError, 2)]
)
async def test_a_step_that_succeeds_in_the_end_drops_nothing(
    tmp_path: Path, failure: type[Exception], fails: int
) -> None:
    world = World(tmp_path)
    with using({"e2"}, failure, fails):
        await world.run(settings())
        world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(5)))
        await world.run(settings())
    assert trained_in(world) == {f"e{n}" for n in range(5)}


async def test_rows_that_only_fail_together_do_not_stop_training(tmp_path: Path) -> None:
    """If two rows fail together, one is dropped. If no single row is the cause, the whole batch is dropped."""

    class Together(services.RememberingLearner):
        def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
            names = {row.experience_id for row in batch.rows}
            if {"e0", "e4"} <= names or len({"e5", "e6", "e8", "e9"} & names) > 2:
                raise ArithmeticError("overflow")
            return super().step(batch, stop, from_base=from_base)

    backend = Backend(lambda _, chosen: Together(chosen.lineage))
    world = World(tmp_path)
    with mock.patch("headrace_trainer.torch_learner.TORCH", backend):
        await world.run(settings())
        world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(15)))
        await world.run(settings())
    invalid = [verdict.experience_id for verdict in world.bus.verdicts if verdict.dropped]
    assert invalid == ["e0", *(f"e{n}" for n in range(5, 10))]
    assert len(trained_in(world)) == 9


def test_the_search_takes_few_steps() -> None:
    """The search for one of 64 rows halves the batch repeatedly instead of trying each row."""
    attempts: list[int] = []

    class PreparedBatch:
        def __init__(self, items: Any) -> None:
            self.batch = items

    def take(items: Any) -> Any:
        attempts.append(len(items))
        if 37 in items:
            raise ValueError("37")

    trials = culprits.Trials(take, PreparedBatch, lambda: None)  # type: ignore[arg-type]
    ((item, error),) = trials.find_culprits(culprits.StepFailed(range(64), ValueError()))  # type: ignore[arg-type]
    number: Any = item
    assert number == 37
    assert str(error) == "37"
    assert len(attempts) == 12


@pytest.fixture
def torch_learner(base: Path, make: Make) -> TorchLearner:
    return TorchLearner.open(base, make(native={"tokens": 0}, compute={"pack_tokens": 16}))


def test_a_torch_step_that_fails_before_the_weights_move_changes_nothing(
    torch_learner: TorchLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_learner.step(batch(0), GOING_ON)
    before, backward, passes = frozen(torch_learner), steps._backward, iter(range(99))

    def broken(*args: Any, **more: Any) -> None:
        torch.rand(3)
        if next(passes) == 2:
            raise RuntimeError("out of range")
        backward(*args, **more)

    monkeypatch.setattr(steps, "_backward", broken)
    with pytest.raises(RuntimeError, match="out of range"):
        torch_learner.step(batch(10), GOING_ON)
    assert frozen(torch_learner) == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: tried 9 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=["CUDA", "CPU", "cuBLAS", "Python"],
)
def test_a_torch_step_without_enough_memory_changes_nothing_and_names_the_setting(
    torch_learner: TorchLearner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    torch_learner.step(batch(0), GOING_ON)
    before = frozen(torch_learner)
    monkeypatch.setattr(steps, "_backward", mock.Mock(side_effect=error))
    with pytest.raises(MemoryError, match=r"lower trainer\.compute\.pack_tokens"):
        torch_learner.step(batch(10), GOING_ON)
    assert frozen(torch_learner) == before


def test_a_torch_step_that_fails_while_the_weights_move_loses_them(
    torch_learner: TorchLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("launch failure")

    monkeypatch.setattr(torch_learner.policy, "update_weights", broken)
    with pytest.raises(LearnerLost, match="launch failure"):
        torch_learner.step(batch(0), GOING_ON)


async def test_a_row_that_torch_cannot_train_ends_by_name(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, train, rules = World(tmp_path), steps.train, make(batch_experiences=4)

    def broken(policy: Any, optimizer: Any, batch: Batch, *args: Any, **more: Any) -> StepResult:
        if any(row.experience_id == "e2" for row in batch.rows):
            raise RuntimeError("CUDA error: device-side assert triggered")
        return train(policy, optimizer, batch, *args, **more)

    monkeypatch.setattr(learners, "train", broken)
    await world.run(rules)
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 3) for n in range(8)))
    trainer = await world.run(rules)
    assert trained_in(world) == {f"e{n}" for n in range(8)} - {"e2"}
    (verdict,) = (entry for entry in world.bus.verdicts if entry.dropped)
    assert (verdict.experience_id, verdict.dropped) == ("e2", "invalid")
    assert verdict.detail == "RuntimeError: CUDA error: device-side assert triggered"
    monkeypatch.setattr(learners, "train", train)
    plan, world.bus = replayed(world)
    assert [entry.experiences for entry in plan.batches] == [3, 4]
    replay = await world.run(make(lineage="again", replays="main", topic="copy", until_end=True, cut="recorded"))
    assert trainer.lineage is not None
    assert replay.lineage is not None
    learned = [entry.lineage.learner for entry in (trainer, replay) if entry.lineage is not None]
    live, again = (entry.policy.tensors() for entry in learned if isinstance(entry, TorchLearner))
    assert all(torch.equal(live[name], again[name]) for name in live), "the step was as if the row had not been there"


def test_reasons_of_failed_rows_do_not_displace_the_metrics_of_steps() -> None:
    texts = [f"ValueError: row {number} of the batch" for number in range(VALUES_MAX)]
    details = [*texts, "examples", "the gradient is not finite", None]
    outcomes = [
        TrainingOutcome(experience_id=f"e{number}", revision=0, turn_ids=(), dropped="invalid", detail=detail)
        for number, detail in enumerate(details)
    ]
    metrics = summarize_steps([{"reward_mean": 0.5}], outcomes)
    assert metrics == {
        "steps": 1.0, "reward_mean": 0.5, "dropped/examples": 1.0, "dropped/invalid": float(VALUES_MAX + 2)
    }  # fmt: skip
