"""Reports for people: TensorBoard files, gauges, one line per step."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace_trainer.report import Reporter
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, decision, experience


async def test_steps_and_versions_reach_tensorboard_and_prometheus(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 2, task="t") for n in range(8)))
    measured = decision(version, "evaluated").model_copy(update={"statistics": {"score": 0.75, "tasks": 20.0}})
    world.bus.produce(measured, decision(version, "promoted"), decision("m@0123456789ab", "rejected", number=9))
    reporter = Reporter(tmp_path / "board")
    world.reporter = reporter  # type: ignore[assignment]
    await world.run(make())
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"step/reward_mean", "step/loss", "step/entropy", "reward/default/t", "staleness/0", "version"} <= tags
    assert [point.step for point in events.Scalars("step/loss")] == [1, 2]
    assert [point.value for point in events.Scalars("version")] == [1.0, 2.0]
    assert [point.value for point in events.Scalars("registry/score")] == [0.75]
    assert [point.value for point in events.Scalars("registry/promoted")] == [0.0]
    assert "registry/rejected" not in tags, "that version is not of this lineage"
    assert REGISTRY.get_sample_value("headrace_trainer_steps") == 2
    assert REGISTRY.get_sample_value("headrace_trainer_measure", {"measure": "reward_mean"}) == 0.5
    assert REGISTRY.get_sample_value("headrace_trainer_measure", {"measure": "reward/default/t"}) is None, "no bound"


async def test_a_terminal_gets_one_line_per_step(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    await world.run(make())
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 2) for n in range(4)))
    reporter = Reporter(tmp_path / "board")
    reporter._console = Console(stderr=True, width=300, force_terminal=False)
    world.reporter = reporter  # type: ignore[assignment]
    capsys.readouterr()
    await world.run(make())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("step", "version"))]
    assert len(lines) == 2
    assert lines[0].startswith("step 1 on v0  reward 0.500  kl ")
    assert "tokens/s  waiting 0" in lines[0]
    assert lines[1].startswith("version 1  m@")
