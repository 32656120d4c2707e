"""Tests of gate trials: results, statistics, the next anchor, and error rates by simulation.

A gate program may be started ahead of the trial. This copy is used once, and only while it is healthy.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks._gate_trials import Floats, Trials, fresh, play
from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.gate.trial import SuccessionEvidence, Trial
from headrace_registry.settings import GateSettings
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, AnchorState
from headrace_statistics import e_process
from headrace_statistics.e_process import EProcess
from tests.support.processes import alive, wait_until
from tests.unit.registry.test_gate import V1, gate, pids

RULE = GateSettings(margin=0.25, anchor_margin=0.125, tasks_max=2000)
CANDIDATE, CHAMPION, ANCHOR = "m@c00000000000", "m@d00000000000", "m@a00000000000"


def evidence_json(wealth: float = 0.0) -> str:
    return SuccessionEvidence(CHAMPION, ANCHOR, 0.005, EProcess(0.0, 0.125, log_wealth=wealth)).to_json()


def played(trial: Trial, scores: Mapping[str, float]) -> Trial:
    """Play the trial to its end with constant `scores`, and return it."""
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
    """The candidate equals the champion and is 25 points below the anchor."""
    trial = Trial(RULE, 2, CANDIDATE, CHAMPION, AnchorState(ANCHOR, 1, evidence_json()))
    assert trial.players == (CANDIDATE, CHAMPION, ANCHOR)
    result = played(trial, {CANDIDATE: 0.5, CHAMPION: 0.5, ANCHOR: 0.75}).result()
    assert not result.passed
    assert result.reason == f"inferior to the anchor {ANCHOR}"
    assert result.statistics["anchor_difference"] == -0.25
    assert result.statistics["anchor_margin"] == 0.125
    assert result.anchor_state.anchor == ANCHOR


def test_trial_drops_opponents_with_a_decision() -> None:
    """The margin to the champion is twice the margin to the anchor, so that this comparison is decided earlier."""
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
    """A version must be better than the anchor to replace it, which needs evidence that later trials continue to
    collect."""
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
        CANDIDATE, CHAMPION, e_process.succession_error(0.05, 1), EProcess(0.0, RULE.anchor_margin)
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
    """Return the scores of several versions for one task with a random difficulty that they share."""
    hardness = chance.gauss(0, 0.5)
    return [float(chance.random() + hardness < value) for value in true]


@pytest.mark.parametrize(("worse", "wrong"), [(0.0, False), (0.25, True)])
def test_trial_error_rates_hold_by_brute_force(worse: float, wrong: bool) -> None:
    """In 800 trials, the rate of wrong results is below its bound (0.02 and 0.05) within sampling error."""
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
    """The registry and the benchmark give equal verdicts and numbers for equal scores."""
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


COUNTED = """
import json, os, sys
with open(sys.argv[1], "a") as started:
    started.write(f"{os.getpid()}\\n")
print(json.dumps({"gate": ["a"], "audit": ["c"]}), flush=True)
for line in sys.stdin:
    print(json.dumps(json.loads(line) | {"score": 0.5}), flush=True)
"""


async def started_in(file: Path) -> int:
    """Wait until a program has written its process id, and return the first id."""
    await asyncio.to_thread(wait_until, lambda: pids(file), 60, "the spare program's start")
    return pids(file)[0]


async def test_gate_session_uses_the_program_that_was_started_ahead(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = gate(COUNTED, str(started))
    program.prepare()
    program.prepare()
    await started_in(started)
    async with program.session() as fresh:
        assert await fresh.play(V1, "a", 1) == 0.5, "an audit leaves the spare program to the next trial"
    async with program.session(use_spare=True) as session:
        assert len(pids(started)) == 2
        assert await session.play(V1, "a", 7) == 0.5
    assert not any(alive(pid) for pid in pids(started))
    async with program.session(use_spare=True):
        assert len(pids(started)) == 3, "a spare program is used once"


async def test_gate_session_starts_an_edited_program_again(tmp_path: Path) -> None:
    file, started = tmp_path / "gate.py", tmp_path / "started"
    file.write_text(COUNTED)
    program = Gate(GateSettings(command=("{python}", str(file), str(started)), base_url="http://g/v1"))
    program.prepare()
    await started_in(started)
    file.write_text(COUNTED.replace("0.5", "0.25"))
    async with program.session(use_spare=True) as session:
        assert await session.play(V1, "a", 7) == 0.25
        assert len(pids(started)) == 2
        assert not alive(pids(started)[0])
    assert program.sha256 == Gate(program._settings).sha256


@pytest.mark.parametrize("ended_by", ["itself", "the time that it may wait"])
async def test_gate_session_does_without_a_spare_program_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    if ended_by != "itself":
        monkeypatch.setattr("headrace_registry.gate.gate._SPARE_S", 0.01)
    started = tmp_path / "started"
    program = gate(COUNTED, str(started))
    program.prepare()
    pid = await started_in(started)
    if ended_by == "itself":
        os.kill(pid, signal.SIGKILL)
    entry = Path(f"/proc/{pid}")  # a zombie still has it: it goes once the event loop has heard of the end
    await asyncio.to_thread(wait_until, lambda: not entry.exists(), 60, "the spare program's end")
    await asyncio.sleep(0.05)
    async with program.session(use_spare=True) as session:
        assert await session.play(V1, "a", 7) == 0.5
    assert len(pids(started)) == 2


async def test_gate_cancellation_kills_a_spare_program_that_has_named_no_tasks(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = gate(COUNTED.replace("print(", "sys.stdin.read(); print("), str(started))
    program.prepare()
    pid = await started_in(started)
    trial = asyncio.create_task(program.session(use_spare=True).__aenter__())
    await asyncio.sleep(0)
    trial.cancel()
    async with asyncio.timeout(15):
        with pytest.raises(asyncio.CancelledError):
            await trial
    assert not alive(pid)


async def test_gate_spare_program_that_fails_is_reported_by_the_trial_alone() -> None:
    program = gate("import sys; sys.exit('no gateway')")
    program.prepare()
    with pytest.raises(GateFailed, match="no gateway"):
        async with program.session(use_spare=True):
            pass
