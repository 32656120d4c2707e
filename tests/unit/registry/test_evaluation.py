"""How a trial and an audit are played: what is drawn, in which order scores count, how many plays are under way."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest

from headrace_registry.evaluation import AuditRoom, draws, run_audit, run_trial, summary
from headrace_registry.gate import GateFailed
from headrace_registry.settings import GateSettings
from headrace_registry.trial import Trial
from headrace_schemas.gate import Tasks

CANDIDATE, CHAMPION = "m@c00000000000", "m@d00000000000"
RULE = GateSettings(margin=0.25, tasks_max=500)


class FakeSession:
    """Scores as `score` says; slow tasks are answered after quick ones."""

    tasks = Tasks(gate=("quick", "slow"), audit=("a", "b", "c"))

    def __init__(self, score: Callable[[str, str], float]) -> None:
        self._score = score
        self.under_way = 0
        self.most = 0
        self.asked: list[tuple[str, str, int]] = []

    async def play(self, version: str, task: str, seed: int) -> float:
        self.asked.append((version, task, seed))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(50 if task == "slow" else 1):
                await asyncio.sleep(0)
            return self._score(version, task)
        finally:
            self.under_way -= 1


def test_tasks_and_seeds_are_drawn_alike_and_again_for_the_same_trial() -> None:
    tasks = Tasks(gate=("a", "b", "b"), audit=("c",))
    drawn = list(itertools.islice(draws(tasks, "v 1"), 3000))
    assert drawn == list(itertools.islice(draws(tasks, "v 1"), 3000))
    assert drawn != list(itertools.islice(draws(tasks, "v 2"), 3000))
    share = Counter(task for task, _ in drawn)["b"] / 3000
    assert abs(share - 2 / 3) < 5 * math.sqrt(2 / 9 / 3000), "a task that stands there twice counts twice"
    assert len({seed for _, seed in drawn}) > 2990


async def test_scores_count_in_the_order_of_the_draws() -> None:
    """Slow tasks are lost and quick ones won. Taken as they come, the quick ones would decide."""
    seen: list[float] = []

    class Watched(Trial):
        def take(self, scores):  # type: ignore[no-untyped-def]
            seen.append(scores[CANDIDATE] - scores[CHAMPION])
            super().take(scores)

    session = FakeSession(lambda version, task: 0.5 if version == CHAMPION else float(task == "quick"))
    trial = Watched(RULE, 1, CANDIDATE, CHAMPION)
    await run_trial(session, trial, concurrency=8, timeout_s=60)
    expected = itertools.islice(draws(session.tasks, f"{CANDIDATE} 1"), len(seen))
    assert seen == [0.5 if task == "quick" else -0.5 for task, _ in expected]
    assert len(seen) > 20


@pytest.mark.parametrize("concurrency", [2, 7, 16])
async def test_plays_under_way_are_bounded_and_none_stays_behind(concurrency: int) -> None:
    session = FakeSession(lambda version, task: 0.5)
    result = await run_trial(session, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=concurrency, timeout_s=60)
    assert result.passed
    assert session.most == concurrency
    assert session.under_way == 0
    assert len(session.asked) <= 2 * (result.statistics["tasks"] + 1 + 2 * concurrency), "what was asked for ahead"


async def test_no_task_beyond_the_last_is_asked_for() -> None:
    session = FakeSession(lambda version, task: 0.5)
    trial = Trial(GateSettings(margin=0.25, tasks_max=5), 1, CANDIDATE, CHAMPION)
    result = await run_trial(session, trial, concurrency=16, timeout_s=60)
    assert "undecided after 5 tasks (gate.tasks_max)" in result.reason
    assert len(session.asked) == 10


async def test_the_time_ends_a_trial_with_what_is_known() -> None:
    class Stuck(FakeSession):
        async def play(self, version: str, task: str, seed: int) -> float:
            if len(self.asked) >= 6:
                await asyncio.Event().wait()
            return await super().play(version, task, seed)

    result = await run_trial(Stuck(lambda *_: 0.5), Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=2, timeout_s=0.2)
    assert not result.passed
    assert "(gate.timeout_s)" in result.reason
    assert result.statistics["tasks"] == 3


async def test_a_play_that_fails_fails_the_trial() -> None:
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


async def test_an_audit_plays_audit_tasks_in_turn_with_seeds_that_are_everybodys() -> None:
    session = FakeSession(lambda version, task: {"a": 1.0, "b": 0.5, "c": 0.0}[task])
    found = await run_audit(session, CANDIDATE, plays=5, room=AuditRoom(2))
    assert sorted(session.asked) == [
        (CANDIDATE, task, seed) for task, seed in zip("aabbc", (0, 3, 1, 4, 2), strict=True)
    ]
    assert session.most == 2
    assert found.scores == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert found.score == pytest.approx(0.6)


def test_an_audit_worked_by_hand() -> None:
    """Scores 1, 0, 1, 1: mean 3/4; squared deviations 1/16, 9/16, 1/16, 1/16, sum 3/4; error √(3/4 / 3 / 4) = 1/4."""
    found = summary([("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 1.0)])
    assert (found.score, found.plays, found.standard_error) == (0.75, 4, 0.25)
    assert found.scores == {"a": 1.0, "b": 0.5}
    assert summary([("a", 1.0)]).statistics() == {"score": 1.0, "tasks": 1.0}


async def test_audit_beside_a_trial_keeps_its_plays_and_takes_an_eighth_of_the_room() -> None:
    class Watched(FakeSession):
        async def play(self, version: str, task: str, seed: int) -> float:
            beside.append(self.under_way + 1)
            return await super().play(version, task, seed)

    beside: list[int] = []
    """Plays of the audit under way, at the begin of each."""
    room, audits, trials = AuditRoom(16), Watched(lambda *_: 0.5), FakeSession(lambda *_: 0.5)
    auditing = asyncio.create_task(run_audit(audits, CHAMPION, plays=200, room=room))
    while len(audits.asked) < 20:  # noqa: ASYNC110 (a play tells nobody)
        await asyncio.sleep(0)
    with room.trial():
        begun = len(audits.asked)
        await run_trial(trials, Trial(RULE, 1, CANDIDATE, CHAMPION), concurrency=16, timeout_s=60)
        ended = len(audits.asked)
    assert begun < ended < 200, "it goes on, and the trial did not wait for its end"
    assert max(beside[begun:ended]) <= 2
    found = await auditing
    assert found.plays == len(audits.asked) == 200
    assert sorted(seed for _, _, seed in audits.asked) == list(range(200)), "each play counts once"
    assert audits.most == max(beside[ended:]) == 16
