"""Algorithms by name: the needs of each, refusals at the start, and `make check NAME=algorithms` with one seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from headrace_trainer.algorithms.catalog import hindsight
from headrace_trainer.algorithms.catalog.hindsight import HindsightSettings
from headrace_trainer.algorithms.needs import OFFERED
from headrace_trainer.algorithms.presets import ALGORITHMS
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.backend import TORCH
from tests.algorithms import losses, stream
from tests.algorithms.planted import BOUND, FAULTS, Fault, caught
from tests.algorithms.program import DIVERGENCES, of_advantages, of_weights
from tests.unit.trainer.conftest import Make

TEACHER = '[trainer.teacher]\nmodel = "http://127.0.0.1:1"'
NEEDS = {
    "cispo": "groups logprobs",
    "dapo": "groups logprobs",
    "distill": "logprobs teacher",
    "dpo": "reference demonstrations pairs",
    "dr-grpo": "groups logprobs",
    "dr_grpo": "groups logprobs",
    "grpo": "groups logprobs",
    "gspo": "groups logprobs",
    "hindsight": "logprobs hindsight",
    "kto": "reference demonstrations",
    "mix": "logprobs demonstrations",
    "multi-step-grpo": "groups logprobs turn_rewards",
    "multi_step_grpo": "groups logprobs turn_rewards",
    "on-policy-distill": "logprobs teacher",
    "on_policy_distill": "logprobs teacher",
    "opmd": "groups",
    "ppo": "logprobs critic",
    "reinforce++": "logprobs",
    "reinforceplusplus": "logprobs",
    "rft": "",
    "rloo": "groups logprobs",
    "sft": "demonstrations",
}


def read(folder: Path, text: str) -> TrainerSettings:
    path = folder / "headrace.toml"
    path.write_text(f'[trainer]\nbase = "x"\n{text}\n', encoding="utf-8")
    return load("trainer", TrainerSettings, path, {})[1]


@pytest.mark.parametrize("name", NEEDS)
def test_each_algorithm_says_what_it_needs_and_torch_has_it(name: str, tmp_path: Path) -> None:
    settings = read(tmp_path, f'algorithm = "{name}"\n{TEACHER}')
    assert set(NEEDS[name].split()) == {need for need in settings.needs.__slots__ if getattr(settings.needs, need)}
    assert settings.needs.missing_from(OFFERED | TORCH.offers) == ()


def test_no_algorithm_is_left_out() -> None:
    assert set(ALGORITHMS.names()) == set(NEEDS)


def test_the_default_trains_rewards_alone_and_as_it_did(tmp_path: Path) -> None:
    settings = read(tmp_path, "")
    assert settings.advantage.signals.rewards_alone
    assert (settings.algorithm, settings.loss.kind, settings.loss.agg_mode) == ("reinforce++", "clipped", "token-mean")
    assert not settings.needs_base


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            'algorithm = "sft"\nloss.kind = "clipped"',
            r"loss\.kind = 'clipped': needs the engine's logprobs, which written",
        ),
        (
            'algorithm = "grpo"\nloss.kind = "dpo"',
            r"loss\.kind = 'dpo': compares two answers, and advantages of kind grpo",
        ),
        (
            'algorithm = "on_policy_distill"',
            r"teacher\.model = '': on_policy_distill learns from a teacher: name a model's",
        ),
        ('algorithm = "multi_step_grpo"\ngroup_size = 1', r"group_size = 1: step_wise_grpo compares runs of one task"),
        ('algorithm = "opmd"\ngroup_size = 1', r"group_size = 1: opmd compares runs of one task"),
        ('algorithm = "ddpo"', r"algorithm = 'ddpo': .* did you mean 'dpo'\?"),
        ("loss.agg_mode = 'mean'", r"loss\.agg_mode = 'mean'"),
        ("loss.dpo.beta = 0", r"loss\.dpo\.beta = 0"),
    ],
)
def test_what_cannot_work_stops_the_start(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(SettingError, match=rf"trainer\.{message}"):
        read(tmp_path, lines)


def test_a_back_end_that_has_no_pairs_refuses_dpo_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.simulation.learner import BACKEND

    monkeypatch.setattr("headrace_trainer.torch_learner.backend.TORCH", BACKEND)
    with pytest.raises(
        SettingError, match=r"trainer\.algorithm = 'dpo': .* need reference and pairs, which the back end"
    ):
        read(tmp_path, 'algorithm = "dpo"')


@pytest.mark.parametrize("case", losses.CASES, ids=str)
def test_loss_and_gradient_equal_the_oracles(case: losses.Case) -> None:
    assert losses.off_value(case, 7) < BOUND
    assert losses.off_gradient(case, 7) < BOUND


@pytest.mark.parametrize("mode", losses.AGG_MODES)
def test_losses_are_added_up_as_the_mode_says(mode: str) -> None:
    assert losses.off_agg_mode(mode, 7) < BOUND


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergences_equal_the_oracles(kind: str) -> None:
    assert losses.off_divergence(kind, 7) < BOUND


def test_advantages_equal_the_oracles() -> None:
    assert [line.name for line in of_advantages(2) if not line.holds] == []


def test_promises_hold_with_edits_and_preferences(base: Path) -> None:
    assert [broken for broken in stream.every(range(3), base) if broken[1]] == []


@pytest.mark.long
def test_what_is_liked_gains_and_what_is_withdrawn_is_taken_back(base: Path) -> None:
    assert [line for line in of_weights(base) if not line.holds] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, base: Path) -> None:
    assert caught(fault, base)


def test_the_preset_of_hindsight_has_its_own_section(make: Make) -> None:
    settings = make(algorithm="hindsight")
    assert settings.needs.hindsight
    assert settings.needs_base
    assert hindsight.hindsight_of(settings.advantage).runs_min == 4
    with pytest.raises(ValueError, match=r"contradicted_max is not below accepted_min = 0\.75"):
        HindsightSettings(contradicted_max=0.75)
    with pytest.raises(ValueError, match=r"runs_min is above runs_max = 3"):
        HindsightSettings(runs_max=3)
