"""P9: the same experiences in the same order make the same batches, byte for byte, in any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience
from headrace_trainer.torch_learner import learner as learners
from headrace_trainer.torch_learner.step import train
from tests.support.torch_learners import policy_of
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, experience


def stream(version: str) -> list[Experience]:
    events = [
        experience(n, version, reward=(n * 5) % 7 / 3, task=f"t{n % 3}", run=str(n), weight=0.5, length=10 + n)
        for n in range(12)
    ]
    return [*events[:7], experience(2, version, reward=-1.0, revision=1, task="t2", run="2"), events[3], *events[7:]]


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the digest of every trained batch, in order."""
    batch_digests: list[str] = []

    def noting(policy: Any, optimizer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        batch_digests.append(batch.digest())
        return train(policy, optimizer, batch, *rest, **more)

    monkeypatch.setattr(learners, "train", noting)
    return batch_digests


async def batches(folder: Path, settings: Any, digests: list[str], per_poll: int, restart: bool = False) -> list[str]:
    digests.clear()
    world = World(folder)
    await world.run(settings)
    events = stream(world.bus.checkpoints[0].version)
    cut = len(events) // 2 if restart else 0
    if restart:
        world.bus.produce(*events[:cut])
        await world.run(settings, per_poll)
    world.bus.produce(*events[cut:])
    await world.run(settings, per_poll)
    return digests.copy()


@pytest.mark.parametrize(
    "kind", ["reinforce++", pytest.param("grpo", marks=pytest.mark.long), pytest.param("rloo", marks=pytest.mark.long)]
)
async def test_equal_streams_make_equal_batches(tmp_path: Path, make: Make, digests: list[str], kind: str) -> None:
    settings = make(advantage={"kind": kind}, group_size=2, max_staleness=50)
    first = await batches(tmp_path / "a", settings, digests, per_poll=1)
    again = await batches(tmp_path / "b", settings, digests, per_poll=99)
    restarted = await batches(tmp_path / "c", settings, digests, per_poll=2, restart=True)
    assert len(first) >= 2
    assert first == again == restarted


async def test_a_replay_into_a_new_lineage_repeats_batches_and_weights(
    tmp_path: Path, make: Make, digests: list[str]
) -> None:
    """The live run samples from each version as it appears, some of it too old by then; the replay has only events."""
    world = World(tmp_path)
    settings = make(max_staleness=1, batch_experiences=3)
    live = await world.run(settings)
    for turn in range(5):
        newest, older = world.bus.checkpoints[-1].version, world.bus.checkpoints[max(0, turn - 2)].version
        world.bus.produce(*(experience(10 * turn + n, newest, reward=n % 3, task=f"t{n % 2}") for n in range(3)))
        world.bus.produce(experience(10 * turn + 9, older, reward=5.0))
        live = await world.run(settings)
    original, fates = digests.copy(), world.bus.fates
    assert len(original) == 5
    assert "stale" in fates.values()

    digests.clear()
    world.bus.sent.clear()
    again = await world.run(make(max_staleness=1, batch_experiences=3, lineage="again", replays="main"))
    assert digests == original
    assert world.bus.fates == fates
    assert live.lineage is not None
    assert again.lineage is not None
    replayed_tensors = policy_of(again.lineage).tensors()
    assert all(
        torch.equal(tensor, replayed_tensors[name]) for name, tensor in policy_of(live.lineage).tensors().items()
    )


async def test_without_being_told_a_new_lineage_knows_no_versions_of_another(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    await world.run(make())
    world.bus.sent.clear()
    await world.run(make(lineage="again"))
    assert set(world.bus.fates.values()) == {"foreign_version"}


@pytest.mark.parametrize(
    ("replays", "message"), [("nothing", "no such lineage in this blob store"), ("main", "is this lineage itself")]
)
async def test_a_replay_of_nothing_is_a_setting_error(tmp_path: Path, make: Make, replays: str, message: str) -> None:
    with pytest.raises(SettingError, match=f"trainer.replays = '{replays}': {message}"):
        await World(tmp_path).run(make(replays=replays))


async def test_another_reward_makes_other_batches(tmp_path: Path, make: Make, digests: list[str]) -> None:
    """The comparison can fail."""
    first = await batches(tmp_path / "a", make(max_staleness=50), digests, per_poll=1)
    other = await batches(tmp_path / "b", make(max_staleness=50, advantage={"scale": "none"}), digests, per_poll=1)
    assert first != other
    assert len(first) == len(other)
