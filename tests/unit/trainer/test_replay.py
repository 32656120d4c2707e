"""P9: the same experiences in the same order make the same batches, byte for byte, in any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_schemas import Experience
from headrace_trainer import lineage as lineages
from headrace_trainer.step import train
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
    """Of every batch that is trained, in order."""
    found: list[str] = []

    def noting(policy: Any, optimizer: Any, batch: Any, *rest: Any) -> Any:
        found.append(batch.digest())
        return train(policy, optimizer, batch, *rest)

    monkeypatch.setattr(lineages, "train", noting)
    return found


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


@pytest.mark.parametrize("kind", ["reinforce++", "grpo", "rloo"])
async def test_equal_streams_make_equal_batches(tmp_path: Path, make: Make, digests: list[str], kind: str) -> None:
    settings = make(advantage={"kind": kind}, group_size=2, max_staleness=50)
    first = await batches(tmp_path / "a", settings, digests, per_poll=1)
    again = await batches(tmp_path / "b", settings, digests, per_poll=99)
    restarted = await batches(tmp_path / "c", settings, digests, per_poll=2, restart=True)
    assert len(first) >= 2
    assert first == again == restarted


async def test_another_reward_makes_other_batches(tmp_path: Path, make: Make, digests: list[str]) -> None:
    """The comparison can fail."""
    first = await batches(tmp_path / "a", make(max_staleness=50), digests, per_poll=1)
    other = await batches(tmp_path / "b", make(max_staleness=50, advantage={"scale": "none"}), digests, per_poll=1)
    assert first != other
    assert len(first) == len(other)
