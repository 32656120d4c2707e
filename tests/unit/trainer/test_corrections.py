"""P10 and P4 together: whatever the order of verdicts, the weights end nearly as if only the last had been trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.kafka.wire import Record
from headrace_trainer.batches.batch import Batch
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.trainer import Trainer
from tests.learning.corrections import Case, rest
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Idle, World, experience


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def advantages(world: World, trainer: Trainer, number: int) -> list[float]:
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get(f"e{number}")
    assert entry is not None
    return [contribution.advantage for contribution in entry.contributions]


async def begin(world: World, make: Make, **settings: Any) -> str:
    await world.run(make(**settings))
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=float(n % 2), task="t") for n in range(4)))
    await world.run(make(**settings))
    return version


async def test_a_revision_of_what_still_waits_replaces_it(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(
        experience(0, version, 0.0), experience(0, version, 1.0, revision=1), experience(0, version, 5.0, revision=2)
    )
    world.bus.produce(*(experience(n, version, 0.0) for n in range(1, 4)))
    await world.run(make())
    expected = {("e0", 0): "superseded", ("e0", 1): "superseded", ("e0", 2): "trained"}
    assert {key: outcome for key, outcome in world.bus.fates.items() if key[0] == "e0"} == expected
    assert next(verdict for verdict in world.bus.verdicts if not verdict.dropped).experience_id == "e0", "same place"
    assert world.reporter.steps[0]["reward_mean"] == 5 / 4


async def test_a_withdrawal_of_what_still_waits_removes_it(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(experience(0, version), experience(0, version, None, revision=1, branch=False))
    await world.run(make())
    assert world.bus.fates == {("e0", 0): "superseded", ("e0", 1): "withdrawn"}


async def test_a_revision_after_training_adds_what_is_missing(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, 0.0, revision=1, task="t"))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    first, second = advantages(world, trainer, 1)
    assert first > 0
    same_reward = advantages(world, trainer, 0)[0]
    assert first + second < 0
    assert second == pytest.approx(-1.0 * first / (1 - 1 / 3), rel=1e-5), "(0 - 1) in the units of the first training"
    assert same_reward < 0
    assert world.reporter.steps[-1]["corrections"] == 1


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_a_withdrawal_after_training_takes_everything_back(world: World, make: Make, with_tokens: bool) -> None:
    """The tokens may come with it or not: then they are read again from where they were on the bus."""
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1, branch=with_tokens))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(0.0, abs=1e-7)


async def test_a_withdrawal_whose_tokens_are_gone_is_dropped_and_said(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1, branch=False))
    trainer = world.trainer(make())
    fetched: list[tuple[int, int]] = []

    async def find_expiry(positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        fetched.extend(positions)
        return {}

    world.source.fetch = find_expiry  # type: ignore[method-assign]
    with pytest.raises(Idle):
        await trainer.run()
    first = next(r for r in world.bus.records if r.topic == "experiences" and b'"e1"' in (r.value or b""))
    assert fetched == [(first.partition, first.offset)]
    assert world.bus.fates["e1", 1] == "withdrawn"


async def test_an_unchanged_reward_is_not_trained_again(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(experience(1, version, 1.0, revision=1, task="t"))
    await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "unchanged"
    assert len(world.bus.checkpoints) == 2


async def test_there_and_back_again_is_nothing(world: World, make: Make) -> None:
    version = await begin(world, make)
    for revision, reward in ((1, 0.0), (2, None), (3, 1.0)):
        world.bus.produce(experience(1, version, reward, revision=revision, task="t"))
        trainer = await world.run(make(), wait_s=31)
        assert world.bus.fates["e1", revision] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(advantages(world, trainer, 1)[0], abs=1e-6)


async def test_a_late_lower_revision_changes_nothing(world: World, make: Make) -> None:
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, float(n), revision=2) for n in range(4)))
    await world.run(make())
    world.bus.produce(experience(1, version, 9.0, revision=1), experience(1, version, 1.0, revision=2))
    await world.run(make())
    assert world.bus.fates["e1", 1] == "already_trained"
    assert len(world.bus.fates) == 5, "the redelivery of revision 2 has no second verdict"


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.long), 6])
@pytest.mark.parametrize(
    ("full_rows", "first", "second"),
    [
        pytest.param(8, 1, 8, marks=pytest.mark.long),
        (8, 8, 1),
        pytest.param(8, 4, 4, marks=pytest.mark.long),
        (1, 1, 1),
    ],
)
def test_a_correction_undoes_what_it_says(base: Path, full_rows: int, first: int, second: int, before: int) -> None:
    """With AdamW and its default settings; `make check NAME=learning` measures larger batches."""
    remainder = rest(base, Case(full_rows, first, second, before, seed=7))
    print(remainder)
    assert remainder.worst < 0.25


def test_a_correction_with_another_normaliser_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure can fail: this one takes the weight of the batch that it happens to stand in."""
    monkeypatch.setattr(Batch, "weighted", lambda self, row: replace(row, token_weight=self.token_weight))
    assert rest(base, Case(8, 8, 1, 6, seed=7)).worst > 0.25


async def test_a_correction_comes_with_the_weight_of_its_first_training(world: World, make: Make) -> None:
    """The contribution was one of four; the correction is alone in a batch that was cut by time."""
    version = await begin(world, make)
    world.bus.produce(experience(1, version, None, revision=1))
    trainer = await world.run(make(), wait_s=31)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e1")
    assert entry is not None
    first, second = entry.contributions
    assert first.token_weight == second.token_weight > 0


async def test_a_correction_of_what_an_earlier_release_trained_is_trained_with_its_batch(
    world: World, make: Make
) -> None:
    version = await begin(world, make)
    store = LineageStore(world.blobs, "main")
    store.take_over()
    saved = store.load()
    assert saved is not None
    entry = saved.window["e1"]
    unknown = tuple(contribution.model_copy(update={"token_weight": 0.0}) for contribution in entry.contributions)
    window = saved.window | {"e1": entry.model_copy(update={"contributions": unknown})}
    store.save(saved.model_copy(update={"window": window}))
    store.release()
    world.bus.produce(experience(1, version, None, revision=1))
    trainer = await world.run(make(), wait_s=31)
    assert world.bus.fates["e1", 1] == "trained"
    assert sum(advantages(world, trainer, 1)) == pytest.approx(0.0, abs=1e-7)
