"""Tests of trials and audits (draws, order of scores, limit of concurrent plays) and of the audit filter."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from headrace_registry.gate import evaluation
from headrace_registry.gate.evaluation import AuditLimiter, draw_tasks, run_audit, run_trial, summarize_audit
from headrace_registry.gate.gate import GateFailed
from headrace_registry.gate.trial import Trial
from headrace_registry.settings import GateSettings, RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs import MeasureRequest, MeasureResult, Tasks

CANDIDATE, CHAMPION = "m@c00000000000", "m@d00000000000"
RULE = GateSettings(margin=0.25, tasks_max=500)


class FakeSession:
    """Session with scores from `score`. Slow tasks are answered after fast ones."""

    tasks = Tasks(gate=("quick", "slow"), audit=("a", "b", "c"))

    def __init__(self, score: Callable[[str, str], float]) -> None:
        self._score = score
        self.under_way = 0
        self.most = 0
        self.requests: list[tuple[str, str, int]] = []

    async def play(self, version: str, task: str, seed: int) -> float:
        self.requests.append((version, task, seed))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(50 if task == "slow" else 1):
                await asyncio.sleep(0)
            return self._score(version, task)
        finally:
            self.under_way -= 1


def test_draw_tasks_repeats_for_the_same_trial() -> None:
    tasks = Tasks(gate=("a", "b", "b"), audit=("c",))
    drawn = list(itertools.islice(draw_tasks(tasks, "v 1"), 3000))
    assert drawn == list(itertools.islice(draw_tasks(tasks, "v 1"), 3000))
    assert drawn != list(itertools.islice(draw_tasks(tasks, "v 2"), 3000))
    share = Counter(task for task, _ in drawn)["b"] / 3000
    assert abs(share - 2 / 3) < 5 * math.sqrt(2 / 9 / 3000), "a task that stands there twice counts twice"
    assert len({seed for _, seed in drawn}) > 2990


async def test_run_trial_adds_scores_in_the_order_of_the_draws() -> None:
    """Slow tasks are lost and fast ones are won, so scores in the order of arrival would favour the candidate."""
    seen: list[float] = []

    class Watched(Trial):
        def add_scores(self, scores):  # type: ignore[no-untyped-def]
            seen.append(scores[CANDIDATE] - scores[CHAMPION])
            super().add_scores(scores)

    session = FakeSession(lambda version, task: 0.5 if version == CHAMPION else float(task == "quick"))
    trial = Watched(RULE, 1, CANDIDATE, CHAMPION)
    await run_trial(session, trial, concurrency=8, timeout_s=60)
    expected = itertools.islice(draw_tasks(session.tasks, f"{CANDIDATE} 1"), len(seen))
    assert seen == [0.5 if task == "quick" else -0.5 for task, _ in expected]
    assert len(seen) > 20


@pytest.mark.parametrize("concurrency", [2, 7, 16])
async def test_run_trial_bounds_concurrent_plays_and_leaves_none_running(concurrency: int) -> None:
    session = FakeSession(lambda version, task: 0.5)
    result = await run_trial(session, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=concurrency, timeout_s=60)
    assert result.passed
    assert session.most == concurrency
    assert session.under_way == 0
    assert len(session.requests) <= 2 * (result.statistics["tasks"] + 1 + 2 * concurrency), "what was asked for ahead"


async def test_run_trial_requests_no_task_beyond_tasks_max() -> None:
    session = FakeSession(lambda version, task: 0.5)
    trial = Trial(GateSettings(margin=0.25, tasks_max=5), 1, CANDIDATE, CHAMPION)
    result = await run_trial(session, trial, concurrency=16, timeout_s=60)
    assert "undecided after 5 tasks (gate.tasks_max)" in result.reason
    assert len(session.requests) == 10


async def test_run_trial_ends_undecided_at_its_timeout() -> None:
    class Stuck(FakeSession):
        async def play(self, version: str, task: str, seed: int) -> float:
            if len(self.requests) >= 6:
                await asyncio.Event().wait()
            return await super().play(version, task, seed)

    result = await run_trial(Stuck(lambda *_: 0.5), Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=2, timeout_s=0.2)
    assert not result.passed
    assert "(gate.timeout_s)" in result.reason
    assert result.statistics["tasks"] == 3


async def test_run_trial_fails_with_a_failed_play() -> None:
    def score(version: str, task: str) -> float:
        if task == "slow":
            raise GateFailed("no server")
        return 0.5

    session = FakeSession(score)
    with pytest.raises(GateFailed, match="no server"):
        await run_trial(session, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=8, timeout_s=60)
    assert session.under_way == 0
    with pytest.raises(GateFailed, match="no server"):
        await run_trial(session, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=8, timeout_s=60)


async def test_run_audit_plays_equal_tasks_and_seeds_for_all_versions() -> None:
    session = FakeSession(lambda version, task: {"a": 1.0, "b": 0.5, "c": 0.0}[task])
    audit = await run_audit(session, CANDIDATE, plays=5, limiter=AuditLimiter(2))
    assert sorted(session.requests) == [
        (CANDIDATE, task, seed) for task, seed in zip("aabbc", (0, 3, 1, 4, 2), strict=True)
    ]
    assert session.most == 2
    assert audit.scores == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert audit.score == pytest.approx(0.6)


def test_summarize_audit_equals_a_computation_by_hand() -> None:
    """Scores 1, 0, 1, 1: mean 3/4; squared deviations 1/16, 9/16, 1/16, 1/16, sum 3/4; error √(3/4 / 3 / 4) = 1/4."""
    audit = summarize_audit([("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)])
    assert (audit.score, audit.plays, audit.standard_error) == (0.75, 4, 0.25)
    assert audit.scores == {"a": 1.0, "b": 0.5}
    assert summarize_audit([("a", 1.0)]).statistics() == {"score": 1.0, "tasks": 1.0}


@pytest.mark.parametrize(("prioritized", "share"), [(False, 1), (True, 8)])
async def test_audit_beside_a_trial_gets_a_sixteenth_of_the_plays_or_half(prioritized: bool, share: int) -> None:
    class Watched(FakeSession):
        async def play(self, version: str, task: str, seed: int) -> float:
            beside.append(self.under_way + 1)
            return await super().play(version, task, seed)

    beside: list[int] = []
    """Plays of the audit under way, at the begin of each."""
    plays = 200 * share
    limiter, audits, trials = AuditLimiter(16), Watched(lambda *_: 0.5), FakeSession(lambda *_: 0.5)
    auditing = asyncio.create_task(run_audit(audits, CHAMPION, plays=plays, limiter=limiter))
    while len(audits.requests) < 20:  # noqa: ASYNC110 (a play tells nobody)
        await asyncio.sleep(0)
    limiter.prioritize_audits(prioritized)
    with limiter.trial():
        begun = len(audits.requests)
        await run_trial(trials, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=16, timeout_s=60)
        ended = len(audits.requests)
    assert begun < ended < plays, "it goes on, and the trial did not wait for its end"
    assert max(beside[begun:ended]) <= share
    assert max(beside[begun + 16 : ended], default=share) == share, "once the plays before the trial have ended"
    audit = await auditing
    assert audit.plays == len(audits.requests) == plays
    assert sorted(seed for _, _, seed in audits.requests) == list(range(plays)), "each play counts once"
    assert audits.most == max(beside[ended:]) == 16


PROGRAM = """
import json, sys
print(json.dumps({"gate": ["g"], "audit": ["a", "b", "c"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(asked | {"score": asked["seed"] / 10}), flush=True)
"""
VERSION = "m@000000000000"


async def test_audit_filter_reports_the_task_of_each_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = b"measure %s\n" % MeasureRequest(version=VERSION, plays=5).model_dump_json().encode()
    output = BytesIO()
    monkeypatch.setattr(evaluation, "Lines", lambda: Lines(BytesIO(request), output))
    settings = RegistrySettings.model_validate({"gate": {"command": [sys.executable, "-c", PROGRAM]}})
    await evaluation.play_audits(Common(data_dir=tmp_path), settings)
    word, _, value = output.getvalue().partition(b" ")
    assert word == b"measured"
    scores = (("a", 0.0), ("b", 0.1), ("c", 0.2), ("a", 0.3), ("b", 0.4))
    assert MeasureResult.model_validate_json(value) == MeasureResult(version=VERSION, scores=scores)


async def test_audit_filter_requires_a_gate_program(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no program plays held-out tasks"):
        await evaluation.play_audits(Common(data_dir=tmp_path), RegistrySettings())
