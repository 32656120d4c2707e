"""Trials: passing and failing, statistics, the next anchor, and error rates by brute force."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks._gate_trials import Floats, Trials, fresh, play
from headrace_registry.gate.trial import SuccessionEvidence, Trial
from headrace_registry.settings import GateSettings
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, AnchorState
from headrace_statistics import spending
from headrace_statistics.e_process import EProcess

RULE = GateSettings(margin=0.25, anchor_margin=0.125, tasks_max=2000)
CANDIDATE, CHAMPION, ANCHOR = "m@c00000000000", "m@d00000000000", "m@a00000000000"


def evidence_json(wealth: float = 0.0) -> str:
    return SuccessionEvidence(CHAMPION, ANCHOR, 0.005, EProcess(0.0, 0.125, log_wealth=wealth)).to_json()


def played(trial: Trial, scores: Mapping[str, float]) -> Trial:
    """To its end, with scores that are always the same."""
    while trial.state == "open":
        trial.add_scores({name: scores[name] for name in trial.players})
    return trial


def test_trial_without_an_anchor_compares_with_the_champion() -> None:
    trial = played(Trial(RULE, 1, CANDIDATE, CHAMPION), {CANDIDATE: 0.5, CHAMPION: 0.5})
    result = trial.result()
    assert result.passed
    assert result.reason == f"not inferior to {CHAMPION}"
    numbers = dict(result.statistics)
    assert numbers["plays"] == 2 * numbers["tasks"]
    assert (numbers["difference"], numbers["standard_error"]) == (0.0, 0.0)
    assert numbers["alpha"] == pytest.approx(0.02)
    assert result.anchor_state.anchor == CHAMPION, "as good is not better"
    assert result.anchor_state.trials == 1


def test_trial_requires_passing_against_champion_and_anchor() -> None:
    """The candidate is as good as the champion and 25 points below the anchor."""
    trial = Trial(RULE, 2, CANDIDATE, CHAMPION, AnchorState(ANCHOR, 1, evidence_json()))
    assert trial.players == (CANDIDATE, CHAMPION, ANCHOR)
    result = played(trial, {CANDIDATE: 0.5, CHAMPION: 0.5, ANCHOR: 0.75}).result()
    assert not result.passed
    assert result.reason == f"inferior to the anchor {ANCHOR}"
    assert result.statistics["anchor_difference"] == -0.25
    assert result.statistics["anchor_margin"] == 0.125
    assert result.anchor_state.anchor == ANCHOR


def test_trial_drops_opponents_with_a_decision() -> None:
    """The margin to the champion is twice that to the anchor, and seen sooner."""
    trial = Trial(RULE, 2, CANDIDATE, CHAMPION, AnchorState(ANCHOR, 1, evidence_json()))
    while len(trial.players) == 3:
        trial.add_scores(dict.fromkeys(trial.players, 0.5))
    assert trial.players == (CANDIDATE, ANCHOR)
    assert played(trial, {CANDIDATE: 0.5, ANCHOR: 0.5}).result().passed


def test_trial_treats_minimum_score_as_an_opponent() -> None:
    rule = GateSettings(minimum_score=0.5, margin=0.25)
    assert played(Trial(rule, 1, CANDIDATE, None), {CANDIDATE: 0.75}).result().passed
    result = played(Trial(rule, 1, CANDIDATE, None), {CANDIDATE: 0.0}).result()
    assert result.reason == "inferior to gate.minimum_score = 0.5"
    assert result.anchor_state == AnchorState(None, 1, None)


def test_trial_at_its_cap_is_undecided_with_the_bound() -> None:
    rule = GateSettings(margin=0.25, tasks_max=2)
    trial = played(Trial(rule, 1, CANDIDATE, CHAMPION), {CANDIDATE: 1.0, CHAMPION: 1.0})
    assert trial.state == "undecided"
    reason = f"not shown to be better than {CHAMPION} - 0.25"
    assert trial.result().reason == f"undecided after 2 tasks (gate.tasks_max): {reason}"
    fresh_one = Trial(RULE, 1, CANDIDATE, CHAMPION)
    assert fresh_one.result("gate.timeout_s").reason == f"undecided after 0 tasks (gate.timeout_s): {reason}"
    assert not fresh_one.result("gate.timeout_s").passed
    assert "standard_error" not in fresh_one.result().statistics, "nothing was seen"


def test_trial_makes_a_better_version_the_anchor() -> None:
    """Evidence for better comes later than evidence for not worse, so it takes a lead that is carried on."""
    far = played(Trial(RULE, 3, CANDIDATE, CHAMPION), {CANDIDATE: 1.0, CHAMPION: 0.0})
    assert far.result().anchor_state.anchor == CHAMPION
    anchor_state = AnchorState(ANCHOR, 4, evidence_json(wealth=5.2))
    follows = played(Trial(RULE, 5, CANDIDATE, CHAMPION, anchor_state), {CANDIDATE: 0.0, CHAMPION: 1.0, ANCHOR: 0.5})
    assert follows.result().anchor_state == CHAMPION_IS_ANCHOR, "the champion, which stays, is its own anchor now"
    passes = played(Trial(RULE, 5, CANDIDATE, CHAMPION, anchor_state), {CANDIDATE: 1.0, CHAMPION: 1.0, ANCHOR: 0.5})
    after = passes.result().anchor_state
    assert (after.anchor, after.trials) == (CHAMPION, 1)
    assert after.lead is not None
    fresh_lead = SuccessionEvidence.from_json(after.lead)
    assert fresh_lead == SuccessionEvidence(
        CANDIDATE, CHAMPION, spending.succession(0.05, 1), EProcess(0.0, RULE.anchor_margin)
    )


def test_trial_of_the_anchor_continues_its_family() -> None:
    trial = Trial(RULE, 4, ANCHOR, CHAMPION, AnchorState(ANCHOR, 3, evidence_json()))
    assert trial.players == (ANCHOR, CHAMPION)
    assert played(trial, {ANCHOR: 0.5, CHAMPION: 0.5}).result().anchor_state == AnchorState(None, 4, None)
    again = played(
        Trial(RULE, 4, ANCHOR, CHAMPION, AnchorState(ANCHOR, 3, evidence_json())), {ANCHOR: 0.0, CHAMPION: 1.0}
    )
    assert again.result().anchor_state.anchor == ANCHOR


def test_trial_of_the_anchor_without_opponents_passes() -> None:
    result = Trial(RULE, 4, ANCHOR, None, AnchorState(ANCHOR, 3)).result()
    assert (result.passed, result.anchor_state) == (True, AnchorState(None, 4))


def test_trial_adds_no_evidence_for_a_champion_without_any() -> None:
    """This state follows a rollback, which keeps the anchor."""
    trial = Trial(RULE, 4, CANDIDATE, CHAMPION, AnchorState(ANCHOR, 3))
    result = played(trial, {CANDIDATE: 0.0, CHAMPION: 1.0, ANCHOR: 0.5}).result()
    assert result.anchor_state == AnchorState(ANCHOR, 4)


def test_trial_continues_the_evidence_of_the_champion() -> None:
    first = Trial(RULE, 2, CANDIDATE, CHAMPION, AnchorState(ANCHOR, 1, evidence_json()))
    for _ in range(3):
        first.add_scores({CANDIDATE: 0.5, CHAMPION: 0.75, ANCHOR: 0.5})
    text = first.result().anchor_state.lead
    assert text is not None
    bets = SuccessionEvidence.from_json(text).bets
    assert (bets.count, bets.total) == (3, 0.75)


def scores(chance: random.Random, *true: float) -> list[float]:
    """A task for several versions, with a hardness that they share."""
    hardness = chance.gauss(0, 0.5)
    return [float(chance.random() + hardness < value) for value in true]


@pytest.mark.parametrize(("worse", "wrong"), [(0.0, False), (0.25, True)])
def test_trial_error_rates_hold_by_brute_force(worse: float, wrong: bool) -> None:
    """In 800 trials, the share of wrong results is below its bound (0.02 and 0.05), within the precision of 800
    trials."""
    chance = random.Random(5)
    count = 0
    for _ in range(800):
        trial = Trial(RULE, 1, CANDIDATE, CHAMPION)
        while trial.state == "open":
            candidate, champion = scores(chance, 0.6, 0.6)
            if chance.random() < worse:  # a share of the tasks is lost for certain, another is not won: 25 points less
                candidate, champion = 0.0, 1.0
            elif worse:
                candidate = champion
            trial.add_scores({CANDIDATE: candidate, CHAMPION: champion})
        count += trial.result().passed is wrong
    assert count / 800 <= (0.02 if wrong else 0.05) + 0.01


@pytest.mark.parametrize("seed", range(3))
def test_trial_agrees_with_the_benchmark(seed: int) -> None:
    """Two programs of one design: equal scores give equal verdicts, numbers and leads."""
    print(f"seed {seed}")
    runs, rule = 30, GateSettings(margin=0.2, anchor_margin=0.15, tasks_max=300)
    draw = np.random.default_rng(seed)
    scores = (draw.random((rule.tasks_max, 3, runs)) < draw.uniform(0.4, 0.6, (1, 3, runs))).astype(float)
    apart = np.arange(runs) % 2 == 0
    numbers = draw.integers(1, 5, runs).astype(float)
    trials = Trials(
        np.full(runs, 0.5), np.full(runs, 0.5), np.where(apart, 0.5, np.nan), numbers, fresh(runs), np.full(runs, 0.005)
    )
    task = -1

    def source(_limits: Floats, at: NDArray[np.int64]) -> Floats:
        nonlocal task
        task += 1
        chosen: Floats = scores[task][:, at]
        return chosen

    simulated = play(draw, rule, trials, source)
    for run in range(runs):
        anchor_state = AnchorState(ANCHOR, 0, evidence_json()) if apart[run] else CHAMPION_IS_ANCHOR
        trial = Trial(rule, int(numbers[run]), CANDIDATE, CHAMPION, anchor_state)
        if apart[run]:
            assert trial._champion_evidence is not None
            trial._champion_evidence.bets.gap = rule.anchor_margin
        names = (CANDIDATE, CHAMPION, ANCHOR)
        while trial.state == "open":
            values = dict(zip(names, scores[trial.tasks][:, run], strict=True))
            trial.add_scores({name: values[name] for name in trial.players})
        assert (trial.state == "passed", trial.state == "failed") == (simulated.passed[run], simulated.failed[run])
        assert (trial.tasks, trial.plays) == (simulated.tasks[run], simulated.plays[run])
        assert trial._candidate_evidence is not None
        assert trial._candidate_evidence.bets.log_wealth == pytest.approx(simulated.succession_state[0, run])
        if trial._champion_evidence is not None:
            assert trial._champion_evidence.bets.log_wealth == pytest.approx(simulated.champions_lead[0, run])
