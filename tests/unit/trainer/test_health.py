"""Tests of the limits of healthy training (stopped, undone and resumed steps) and of TensorBoard files, gauges and
log lines."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.loss import drifted_rows
from headrace_trainer.learner import NotFinite, StepResult
from headrace_trainer.lineage.health import NORMS_MAX, NORMS_MIN, Health, TrainingStopped
from headrace_trainer.report import Reporter
from headrace_trainer.settings import HealthSettings
from headrace_trainer.torch_learner import learner as learners
from headrace_trainer.torch_learner.measures import effective_sample_size
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Idle, World, decision, experience


def after(limits: HealthSettings, *steps: dict[str, float]) -> Health:
    health = Health()
    for measured in steps:
        health = health.with_step(measured, limits)
    return health


LOW, FINE = {"entropy": 0.1}, {"entropy": 0.9}


def test_a_limit_has_to_be_passed_in_consecutive_steps() -> None:
    limits = HealthSettings(entropy_min=0.5, patience_steps=3)
    assert after(limits, LOW, LOW, FINE, LOW, LOW).stopped is None
    stop = after(limits, FINE, LOW, LOW, LOW).stopped
    assert stop is not None
    assert stop.reason == "entropy is 0.1, below trainer.health.entropy_min = 0.5, 3 steps in a row"


def test_a_step_without_the_measure_says_nothing_about_it() -> None:
    limits = HealthSettings(mismatch_max=0.5, patience_steps=2)
    bad = {"mismatch_mean": 0.7}
    assert after(limits, bad).doubtful
    assert not after(limits, bad, {}).doubtful, "or a version would be waited for that only its own tokens could free"
    assert after(limits, bad, {}, bad).stopped is not None


def test_a_gradient_is_compared_with_the_median_of_those_before_it() -> None:
    limits = HealthSettings(gradient_spike_max=10, patience_steps=2)
    usual = [{"gradient_norm": 1.0}, {"gradient_norm": 3.0}] * (NORMS_MIN // 2)
    spike = {"gradient_norm": 20.5}
    assert after(limits, *usual, spike).doubtful, "the median is 2"
    assert not after(limits, *usual, {"gradient_norm": 19.5}).doubtful
    assert not after(limits, *usual[1:], {"gradient_norm": 1e9}).doubtful, "too few to know"
    stopped = after(limits, *usual, spike, spike)
    assert stopped.stopped is not None
    assert 20.5 not in stopped.gradient_norms, "a spike does not raise what is usual"
    assert len(after(limits, *usual * 40).gradient_norms) == NORMS_MAX
    endless = after(limits, {"gradient_norm": math.inf}, {"gradient_norm": math.inf})
    assert endless.stopped is not None
    assert "not finite" in endless.stopped.reason
    assert Health.model_validate_json(endless.model_dump_json()) == endless


def test_a_limit_of_zero_is_off_and_a_changed_limit_lifts_its_stop() -> None:
    measured = {"entropy": 0.0, "mismatch_mean": 9.0, "effective_sample_size": 1e-6, "gradient_norm": math.inf}
    off = HealthSettings(mismatch_max=0, effective_sample_min=0, gradient_spike_max=0, patience_steps=1)
    assert after(off, measured).stopped is None
    low = HealthSettings(entropy_min=0.5, patience_steps=1)
    stopped = after(low, LOW)
    assert stopped.with_limits(low) is stopped
    assert stopped.with_limits(HealthSettings(entropy_min=0.05)).stopped is None


def test_a_limit_that_nothing_measures_is_refused(make: Make) -> None:
    with pytest.raises(SettingError, match="kl_base_interval_steps"):
        make(health={"kl_base_max": 1.0})
    assert make(health={"kl_base_max": 1.0, "kl_base_interval_steps": 5}).needs_base


def test_the_effective_sample_size_by_hand() -> None:
    """Weights 1, 1, 2 give (1 + 1 + 2)^2 / (3 (1 + 1 + 4)) = 16 / 18."""
    assert effective_sample_size(torch.tensor([0.0, 0.0, math.log(2)])) == pytest.approx(16 / 18)
    assert effective_sample_size(torch.full((7,), 0.3)) == pytest.approx(1.0)


def test_sequences_are_left_out_by_their_mean_log_ratio() -> None:
    """The ratios of row 0 cancel; the mean log ratios of rows 1 and 2 are +0.6 and -0.6."""
    drift_N = torch.tensor([5.0, -5.0, 0.6, 0.6, -0.5, -0.7])
    row_N = torch.tensor([0, 0, 1, 1, 2, 2])
    assert drifted_rows(drift_N, torch.zeros(6), row_N, 3, 0.5).tolist() == [False, True, True]
    assert drifted_rows(drift_N, torch.zeros(6), row_N, 3, 0.7).tolist() == [False, False, False]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def with_entropies(monkeypatch: pytest.MonkeyPatch, *entropies: float) -> None:
    """Make training steps report `entropies` in turn, and the last entropy from then on."""
    remaining = list(entropies)

    def measured(*args: Any, **more: Any) -> StepResult:
        result = train(*args, **more)
        value = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return replace(result, measured={**result.measured, "entropy": value})

    monkeypatch.setattr(learners, "train", measured)


async def test_the_steps_that_stop_training_are_undone_and_never_published(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make(health={"entropy_min": 0.5, "patience_steps": 2})
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(16)))
    with_entropies(monkeypatch, 0.9, 0.1, 0.1, 0.9)
    trainer = await world.run(settings)
    good = world.bus.checkpoints[-1]
    assert good.step == 1, "neither of the two others"
    assert trainer.stop_reason is not None
    assert "entropy" in trainer.stop_reason
    assert trainer.lineage is not None
    assert trainer.lineage.state.current == good.version, "the weights are the last version's"
    account = world.bus.accounts[-1]
    assert account.stopped is not None
    assert {reversal.experience_id for reversal in account.undone} == {f"e{n}" for n in range(4, 12)}
    assert all(reversal.queued for reversal in account.undone), "fresh ones wait for training to go on"
    assert len(world.reporter.stops) == 1, "said once"

    again = await world.run(settings)  # a crash, or a restart that changes nothing
    assert again.stop_reason == trainer.stop_reason
    assert world.bus.checkpoints[-1] == good
    queued = {(f"e{n}", 0): "queued" for n in range(4, 12)}
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(4)} | queued

    resumed = world.trainer(settings)
    with monkeypatch.context() as patch:
        poll = world.source.poll

        async def report_with(experiences_max: int) -> Any:
            if resumed.stop_reason is not None:
                assert resumed.paused == resumed.stop_reason
                resumed.resume()
            return await poll(experiences_max)

        patch.setattr(world.source, "poll", report_with)
        with pytest.raises(Idle):
            await resumed.run()
    assert resumed.stop_reason is None
    assert world.reporter.stops[-1] is None
    assert world.bus.accounts[-1].stopped is None
    assert world.bus.checkpoints[-1].step > 1
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(16)}, "each once, and none is lost"


async def test_a_doubtful_step_delays_its_version(world: World, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make(health={"entropy_min": 0.5, "patience_steps": 2})
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(8)))
    with_entropies(monkeypatch, 0.1, 0.9)
    trainer = await world.run(settings)
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1], "both steps are in it"
    assert trainer.stop_reason is None
    assert set(world.bus.fates.values()) == {"trained"}


async def test_gradients_that_are_never_finite_stop_training(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make(health={"patience_steps": 2})
    await world.run(settings)
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n) for n in range(12)))

    def broken(*_args: Any, **_more: Any) -> StepResult:
        raise NotFinite

    monkeypatch.setattr(learners, "train", broken)
    trainer = await world.run(settings)
    assert trainer.stop_reason is not None
    assert len(world.bus.fates) == 8, "the third batch waits"


async def test_nobody_can_resume_a_replay_so_it_ends(world: World, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make(health={"entropy_min": 0.5, "patience_steps": 1})
    await world.run(settings)
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 2) for n in range(8)))
    with_entropies(monkeypatch, 0.1)
    with pytest.raises(TrainingStopped, match="entropy_min"):
        await world.trainer(make(health={"entropy_min": 0.5, "patience_steps": 1}, until_end=True)).run()


async def test_a_masked_sequence_is_trained_and_the_weights_hold_nothing_of_it(world: World, make: Make) -> None:
    """The tiny model's logprobs are near -5.8 and those of these experiences between -4 and -7, so all sequences are
    masked."""
    settings = make(loss={"sequence_mask_max": 1e-6})
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 2) for n in range(4)))
    trainer = await world.run(settings)
    assert set(world.bus.fates.values()) == {"trained"}
    assert [record.step for record in world.bus.checkpoints] == [0], "nothing has changed"
    (measured,) = world.reporter.steps
    assert (measured["sequence_masked_fraction"], measured["zero_gradient_fraction"]) == (1.0, 1.0)
    assert trainer.lineage is not None
    entries = [trainer.lineage.state.window.get(f"e{n}") for n in range(4)]
    assert [record.advantage for entry in entries if entry for record in entry.contributions] == [0.0] * 4


async def test_the_divergence_from_the_base_is_measured_now_and_then(world: World, make: Make) -> None:
    settings = make(health={"kl_base_interval_steps": 2})
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(12)))
    await world.run(settings)
    assert ["kl_base" in measured for measured in world.reporter.steps] == [True, False, True]
    assert world.reporter.steps[0]["kl_base"] == pytest.approx(0.0, abs=1e-6), "the weights are the base's"
    assert world.reporter.steps[2]["kl_base"] > 0


async def test_standing_measures_of_groups_and_lag(world: World, make: Make) -> None:
    """Task `a` has equal rewards and so no gradient; task `b` has different rewards."""
    settings = make(advantage={"kind": "grpo"}, group_size=2)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    rewards = [("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)]
    world.bus.produce(
        *(experience(n, version, reward, task=task, run=f"r{n}") for n, (task, reward) in enumerate(rewards))
    )
    await world.run(settings)
    (measured,) = world.reporter.steps
    assert measured["groups"] == 2
    assert measured["zero_advantage_group_fraction"] == measured["zero_advantage_fraction"] == 0.5
    assert (measured["staleness_mean"], measured["staleness_max"]) == (0.0, 0.0)
    assert measured["zero_gradient_fraction"] >= 0.5
    assert 0 < measured["effective_sample_size"] <= 1


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
