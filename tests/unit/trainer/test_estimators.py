"""Tests of algorithms, advantage estimators and losses by name, including those of another package.

They cover the inputs that each algorithm needs, refusals at the start, and `make check NAME=algorithms` with one seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.catalog.hindsight import HindsightSettings
from headrace_trainer.algorithms.estimators import ESTIMATORS, AdvantageInputs
from headrace_trainer.algorithms.losses import LossInputs
from headrace_trainer.algorithms.presets import ALGORITHMS, OFFERED, Needs
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import TORCH
from tests.algorithms import losses, stream
from tests.algorithms.program import BOUND, DIVERGENCES, FAULTS, Fault, is_caught, of_advantages, of_weights
from tests.support import packages
from tests.unit.trainer.conftest import Make

DECAY = Decay(task=0.9, model=0.99, tasks_max=100)
BATCH = AdvantageInputs([1.0, 0.0, 3.0], [1.0, 1.0, 1.0], ["a", "b", "c"], ["t", "t", None])
FOREIGN = """
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.estimators import estimator
from headrace_trainer.algorithms.losses import Loss
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.backends import Backend

class Middle(Section):
    middle: float = 0.5

@estimator(settings=Middle)
def plain(batch, past, decay, settings):
    rewards_B = batch.rewards_B
    middle = settings.of("plain").middle
    return Advantages.of(rewards_B, [middle] * len(rewards_B), [1.0] * len(rewards_B)), past

def _slope():
    from headrace_trainer.algorithms.loss import TokenLoss

    def slope(sampled, settings):
        no_N = sampled.current_N < -1e9
        return TokenLoss(-sampled.current_N * sampled.advantage_N, no_N * 1.0 + 1.0, no_N, no_N, no_N)

    return slope

SLOPE = Loss(_slope)
VALUED = Loss(_slope, Needs(critic=True, reference=True))
MINE = Algorithm("plain", "slope", {"max_staleness": 1, "advantage.plain.middle": 0.25})
THEIRS = Algorithm("plain", "valued")
FRUGAL = Backend(lambda folder, settings: None)
not_one = 3
"""
ANNOUNCED = {
    "headrace.advantages": {"plain": "foreign:plain"},
    "headrace.losses": {"slope": "foreign:SLOPE", "valued": "foreign:VALUED"},
    "headrace.algorithms": {"mine": "foreign:MINE", "theirs": "foreign:THEIRS", "broken": "foreign:not_one"},
    "headrace.trainer_backends": {"frugal": "foreign:FRUGAL"},
}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package `foreign` with an advantage estimator, losses and algorithms, one of which is broken."""
    packages.install(tmp_path, "foreign", ANNOUNCED, foreign=FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "foreign", raising=False)


def settings_of(folder: Path, text: str) -> TrainerSettings:
    path = folder / "headrace.toml"
    path.write_text(f'[trainer]\nbase = "x"\n{text}\n', encoding="utf-8")
    return load("trainer", TrainerSettings, path, {})[1]


@pytest.mark.usefixtures("foreign")
def test_a_package_adds_an_algorithm_without_a_change_here(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'algorithm = "mine"')
    assert (settings.advantage.kind, settings.loss.kind, settings.max_staleness) == ("plain", "slope", 1)
    assert not settings.compares_groups
    advantages, past = settings.advantage.estimator.compute(BATCH, Baselines(), DECAY, settings.advantage)
    assert advantages.values_B == [0.75, -0.25, 2.75]
    assert past == Baselines()
    two_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    sampled = LossInputs(two_N, two_N.detach(), two_N.detach(), torch.tensor([3.0, -1.0]), torch.tensor([0, 1]))
    assert settings.loss.function.load()(sampled, settings.loss).loss_N.tolist() == [3.0, -2.0]


@pytest.mark.usefixtures("foreign")
def test_what_is_set_wins_over_the_algorithm(tmp_path: Path) -> None:
    stated = ['algorithm = "mine"', "max_staleness = 3", 'advantage.kind = "rloo"', 'loss.kind = ""']
    settings = settings_of(tmp_path, "\n".join([*stated, "[trainer.advantage.plain]", "middle = 1"]))
    assert (settings.advantage.kind, settings.loss.kind, settings.max_staleness) == ("rloo", "slope", 3)
    assert settings.advantage.of("plain").model_dump() == {"middle": 1.0}
    with pytest.raises(SettingError, match=r"trainer\.advantage\.plain\.midle = 1: unknown; did you mean 'middle'"):
        settings_of(tmp_path, "advantage.plain.midle = 1")


@pytest.mark.usefixtures("foreign")
def test_what_is_no_algorithm_is_refused_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.algorithm = 'broken': foreign 1\.0 announces foreign:not_one"):
        settings_of(tmp_path, 'algorithm = "broken"')


@pytest.mark.usefixtures("foreign")
def test_what_nobody_has_stops_the_start(tmp_path: Path) -> None:
    message = (
        r"trainer\.algorithm = 'theirs': advantages of kind plain and the loss valued need reference and critic, which"
    )
    with pytest.raises(SettingError, match=message):
        settings_of(tmp_path, 'algorithm = "theirs"\nbackend = "frugal"')
    assert settings_of(tmp_path, 'algorithm = "theirs"').needs.critic, "and torch has both"


def test_needs_add_up() -> None:
    both = Needs(groups=True) | Needs(critic=True)
    assert (both.groups, both.critic, both.reference) == (True, True, False)
    assert both.missing_from(OFFERED) == ("critic",)
    assert Needs(reference=True, logprobs=True).missing_from(OFFERED | TORCH.offers) == ()


@pytest.mark.parametrize(
    ("name", "kind", "scale"),
    [
        ("reinforce++", "reinforce++", "std"),
        ("grpo", "grpo", "std"),
        ("dr-grpo", "grpo", "none"),
        ("rloo", "rloo", "std"),
    ],
)
def test_our_algorithms(tmp_path: Path, name: str, kind: str, scale: str) -> None:
    settings = settings_of(tmp_path, f'algorithm = "{name}"')
    assert (settings.advantage.kind, settings.advantage.scale, settings.loss.kind) == (kind, scale, "clipped")


def test_an_unknown_algorithm_stops_the_start_and_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError,
        match=r"trainer.algorithm = 'grop'.*'grpo'\? there are cispo, dapo, distill, dpo, dr-grpo, dr_grpo, grpo",
    ):
        settings_of(tmp_path, 'algorithm = "grop"')


def test_an_unknown_kind_stops_the_start_and_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[trainer]\nbase = "x"\nadvantage.kind = "grop"\n', encoding="utf-8")
    with pytest.raises(SettingError, match=r"did you mean 'grpo'\? there are demonstrations, grpo, hindsight, labels,"):
        load("trainer", TrainerSettings, path, {})


@pytest.mark.parametrize(("kind", "grouped"), [("reinforce++", False), ("grpo", True), ("rloo", True)])
def test_ours_say_what_they_need(kind: str, *, grouped: bool) -> None:
    assert ESTIMATORS.get(kind).needs.groups is grouped


def test_a_run_without_a_task_is_a_group_of_its_own() -> None:
    assert BATCH.groups() == ["t", "t", "c"]
    with pytest.raises(ValueError, match="has one run"):
        ESTIMATORS.get("rloo").compute(BATCH, Baselines(), DECAY, AdvantageSettings(kind="rloo"))


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


@pytest.mark.parametrize("name", NEEDS)
def test_each_algorithm_says_what_it_needs_and_torch_has_it(name: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f'algorithm = "{name}"\n{TEACHER}')
    assert set(NEEDS[name].split()) == {need for need in settings.needs.__slots__ if getattr(settings.needs, need)}
    assert settings.needs.missing_from(OFFERED | TORCH.offers) == ()


def test_no_algorithm_is_left_out() -> None:
    assert set(ALGORITHMS.names()) == set(NEEDS)


def test_the_default_trains_rewards_alone_and_as_it_did(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "")
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
        settings_of(tmp_path, lines)


def test_a_back_end_that_has_no_pairs_refuses_dpo_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.simulation.services import BACKEND

    monkeypatch.setattr("headrace_trainer.torch_learner.TORCH", BACKEND)
    with pytest.raises(
        SettingError, match=r"trainer\.algorithm = 'dpo': .* need reference and pairs, which the back end"
    ):
        settings_of(tmp_path, 'algorithm = "dpo"')


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
    assert is_caught(fault, base)


def test_the_preset_of_hindsight_has_its_own_section(make: Make) -> None:
    settings = make(algorithm="hindsight")
    assert settings.needs.hindsight
    assert settings.needs_base
    with pytest.raises(ValueError, match=r"contradicted_max = \S+: must be below accepted_min = 0\.75"):
        HindsightSettings(contradicted_max=0.75)
    with pytest.raises(ValueError, match=r"runs_max"):
        HindsightSettings(runs_max=3)
