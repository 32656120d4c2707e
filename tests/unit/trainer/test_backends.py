"""Tests of back ends: selection by name, checks at the start, and a lineage whose learner dies."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.registries import PluginError
from headrace_runtime.settings.sections import load
from headrace_schemas import Checkpoint
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.check import check
from headrace_trainer.learner import Learner, LearnerLost, StepResult
from headrace_trainer.lineage import opening
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trainer import Trainer
from tests.simulation import learner as simulated
from tests.support import plugins
from tests.unit.trainer.world import World, experience

FOREIGN = """
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.losses import Loss
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.backends import Backend
from tests.simulation.learner import BACKEND

class Depth(Section):
    depth: int = 2

PLAIN = BACKEND
DEEP = Backend(BACKEND.open, offers=Needs(reference=True, critic=True), adapters=True, settings=Depth)
PPO = Algorithm("reinforce++", "valued")
VALUED = Loss(lambda: None, Needs(critic=True))
"""
ANNOUNCED = {
    "headrace.trainer_backends": {"plain": "backs:PLAIN", "deep": "backs:DEEP"},
    "headrace.algorithms": {"with-critic": "backs:PPO"},
    "headrace.losses": {"valued": "backs:VALUED"},
}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package `backs` with two back ends, an algorithm that needs a critic, and an invalid entry point."""
    plugins.install(tmp_path / "site", "backs", ANNOUNCED, backs=FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "backs", raising=False)


def settings_of(folder: Path, text: str) -> TrainerSettings:
    path = folder / "headrace.toml"
    path.write_text(f'[trainer]\nbase = "{simulated.BASE}"\n{text}\n', encoding="utf-8")
    return load("trainer", TrainerSettings, path, {})[1]


def test_an_unknown_back_end_stops_the_start_with_those_there_are(tmp_path: Path) -> None:
    message = (
        r"trainer\.backend = 'torhc': .* trainer back end 'torhc'; did you mean 'torch'\? there are ray, torch, trinity"
    )
    with pytest.raises(SettingError, match=message):
        settings_of(tmp_path, 'backend = "torhc"')


def test_what_is_no_back_end_is_refused_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announces = {"headrace.trainer_backends": {"broken": "broken:not_one"}}
    plugins.install(tmp_path / "site", "broken", announces, broken="not_one = 3")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    message = r"broken 1\.0 announces broken:not_one as the trainer back end 'broken'; it has to be a .*Backend"
    with pytest.raises(PluginError, match=message):
        settings_of(tmp_path, 'backend = "torch"')


@pytest.mark.usefixtures("foreign")
def test_what_a_back_end_offers_is_compared_with_what_is_asked(tmp_path: Path) -> None:
    for text, message in (
        (
            'algorithm = "with-critic"',
            r"trainer\.algorithm = 'with-critic': .* need critic, which the back end plain does not have",
        ),
        ("loss.kl = 0.1", r"trainer\.backend = 'plain': cannot compute logprobs of the base"),
        ("health.kl_base_interval_steps = 5", r"trainer\.backend = 'plain': cannot compute logprobs of the base"),
        ("lora.rank = 4", r"trainer\.lora\.rank = 4: the back end plain trains no adapters"),
    ):
        with pytest.raises(SettingError, match=message):
            settings_of(tmp_path, f'backend = "plain"\n{text}')
        settings_of(tmp_path, f'backend = "deep"\n{text}')


@pytest.mark.usefixtures("foreign")
def test_a_back_end_has_a_section_of_its_own(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'backend = "deep"\n[trainer.deep]\ndepth = 3')
    assert settings.of("deep").model_dump() == {"depth": 3}
    with pytest.raises(SettingError, match=r"trainer\.deep\.dept = 3: unknown; did you mean 'depth'"):
        settings_of(tmp_path, "deep.dept = 3")


async def test_the_check_before_a_start_is_the_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[TrainerSettings] = []
    monkeypatch.setattr("headrace_trainer.check._problems", lambda _: iter(()))
    settings = TrainerSettings(base=str(simulated.BASE))
    with as_torch(Backend(simulated.BACKEND.open, check=checked.append)):
        assert await check(mock.Mock(), settings) == []
    assert checked == [settings]
    with as_torch(simulated.BACKEND):
        assert await check(mock.Mock(), settings) == []


@dataclass
class Fragile:
    """Back end that records its learners. The first learner dies as `how` describes."""

    how: Callable[[MortalLearner], None] | None
    opened: list[MortalLearner] = field(default_factory=list)

    def open(self, _folder: Path, settings: TrainerSettings) -> Learner:
        self.opened.append(MortalLearner(settings.lineage, self.how if not self.opened else None))
        return self.opened[-1]


class MortalLearner(simulated.RememberingLearner):
    """Learner that can die during a step or after it."""

    def __init__(self, lineage: str, how: Callable[[MortalLearner], None] | None) -> None:
        super().__init__(lineage)
        self._how = how
        self.why: str | None = None
        self.closed = 0

    @property
    def failure(self) -> str | None:
        return self.why

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        result = super().step(batch, stop, from_base=from_base)
        if self._how is not None and self.updates == 2:
            self._how(self)
        return result

    def close(self) -> None:
        self.closed += 1


def in_the_step(learner: MortalLearner) -> None:
    learner.why = "rank 1 was killed"
    raise LearnerLost(learner.why)


def after_the_step(learner: MortalLearner) -> None:
    learner.why = "rank 1 was killed"


def as_torch(backend: Backend) -> Any:
    return mock.patch("headrace_trainer.torch_learner.TORCH", backend)


def settings(**more: Any) -> TrainerSettings:
    small = {"batch_experiences": 4, "batch_experiences_min": 1, "save_interval_s": 1e9, "max_staleness": 9}
    table = {"base": str(simulated.BASE), "model": "m", "steps_per_version": 3, **small, **more}
    return TrainerSettings.model_validate(table)


def lessons(trainer: Trainer) -> list[tuple[int, str]]:
    assert trainer.lineage is not None
    assert isinstance(trainer.lineage.learner, simulated.RememberingLearner)
    return [(lesson.step, lesson.experience_id) for lesson in trainer.lineage.learner.lessons]


@pytest.mark.parametrize("how", [in_the_step, after_the_step])
async def test_a_learner_that_dies_ends_the_process_and_the_next_one_trains_each_experience_once(
    tmp_path: Path, how: Callable[[MortalLearner], None]
) -> None:
    async def tell(folder: Path, fragile: Fragile) -> tuple[list[tuple[int, str]], World]:
        world = World(folder)
        with as_torch(Backend(fragile.open)):
            lineage = opening.open_lineage(settings(), world.blobs, world.clock)
            version = lineage.state.history.head
            fragile.opened.clear()
            world.bus.produce(*(experience(n, version, reward=n % 2) for n in range(12)))
            if fragile.how is not None:
                with pytest.raises(LearnerLost, match="rank 1 was killed"):
                    await world.trainer(settings()).run()
            return lessons(await world.run(settings())), world

    fragile = Fragile(how)
    calm, _ = await tell(tmp_path / "calm", Fragile(None))
    result, world = await tell(tmp_path / "told", fragile)
    assert result == calm
    assert len(result) == 12
    assert set(world.bus.fates.values()) == {"trained"}
    assert [opened_learner.closed for opened_learner in fragile.opened] == [1, 1]


async def test_a_failure_is_said_and_ends_the_process_while_nothing_is_trained(tmp_path: Path) -> None:
    world, fragile = World(tmp_path), Fragile(None)
    trainer = world.trainer(settings())
    polled = world.source.poll

    async def dies(experiences_max: int) -> Any:
        fragile.opened[0].why = "rank 1 was killed"
        assert trainer.learner_failure == "rank 1 was killed"
        return await polled(experiences_max)

    assert trainer.learner_failure is None, "there is none yet"
    expected_error = pytest.raises(LearnerLost, match="lineage main has lost its weights: rank 1 was killed")
    with as_torch(Backend(fragile.open)), mock.patch.object(world.source, "poll", dies), expected_error:
        await trainer.run()
    assert fragile.opened[0].closed == 1


async def test_a_learner_is_closed_when_its_lineage_does_not_open(tmp_path: Path) -> None:
    world, fragile = World(tmp_path), Fragile(None)
    broken = mock.patch.object(opening, "_restore_state", side_effect=ZeroDivisionError)
    with as_torch(Backend(fragile.open)), broken, pytest.raises(ZeroDivisionError):
        opening.open_lineage(settings(), world.blobs, world.clock)
    assert [opened_learner.closed for opened_learner in fragile.opened] == [1]


@pytest.mark.usefixtures("foreign")
async def test_a_lineage_is_trained_by_a_back_end_that_somebody_else_wrote(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.run(settings(backend="plain", steps_per_version=1))
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 2) for n in range(8)))
    trainer = await world.run(settings(backend="plain", steps_per_version=1))
    assert lessons(trainer) == [(1 + n // 4, f"e{n}") for n in range(8)]
    checkpoint: Checkpoint = world.bus.checkpoints[-1]
    assert checkpoint.step == 2
