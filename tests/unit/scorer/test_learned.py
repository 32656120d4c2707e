"""A reward model in the scorer is fitted beside the stream as thumbs arrive, and scores runs without thumbs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_scorer import schema, upkeep
from headrace_scorer.handlers import Scorer
from headrace_scorer.judge_monitor import JudgeMonitor
from headrace_scorer.learned import refitting
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.support.streams import START, Bench, ManualClock, Service, bench
from tests.support.trajectories import closed
from tests.support.turns import ask, user
from tests.unit.scorer.conftest import LocalPool, Rig

SOURCE = "learned:thumbs"


def quality(trajectory: Trajectory) -> float:
    """Runs with an even name are good, and look so."""
    return 0.8 if int(trajectory.session_id) % 2 == 0 else 0.2


def peeks(feedback: Sequence[Feedback]) -> float | None:
    """Hands the thumb on: it must never become a feature."""
    return next((event.value for event in feedback), None)


@dataclass
class LearnedRig(Rig):
    """With the reward model's parts."""

    learned: LearnedSource
    made: Scorer
    scores: ScoreStore

    async def refit(self) -> None:
        """Fit the models with new thumbs, and score the runs again that this changes."""
        await refitting.refit(self.learned, self.stream.processor)
        await self.stream.step(self.made.rematch)
        await self.run_functions()

    async def end_waiting(self) -> None:
        self.stream.clock.advance(self.settings.reward_wait_s + 1)
        for _ in range(2):  # 25 at a time
            await self.stream.step(lambda tx, now: upkeep.end_waiting(tx, now, self.scores, self.scoring.policy))

    def latest_rewards(self) -> dict[str, tuple[str, float | None]]:
        """The newest word of the reward model about each session."""
        rewards = [reward for reward in self.stream.sent(Reward) if reward.source == SOURCE]
        return {
            reward.trajectory_id: (reward.outcome, reward.value)
            for reward in sorted(rewards, key=lambda reward: reward.revision)
        }


@contextlib.asynccontextmanager
async def learning(url: str, data_dir: Path, *functions: Any, **settings: Any) -> AsyncIterator[LearnedRig]:
    learned_settings = {"model": "thumbs", "thumbs_min": 20, "refit_share": 0.0, **settings.pop("learned", {})}
    weights = {"function:*": 0.0, "*": 1.0}
    chosen = ScorerSettings.model_validate(
        {"learned": learned_settings, "weights": weights, "reward_wait_s": 60.0, **settings}
    )
    cache, pool = TrajectoryCache(), LocalPool(chosen, functions)
    learned = LearnedSource(chosen.learned, lambda: pool.functions)
    scores = ScoreStore(cache, learned, JudgeMonitor(chosen.drift))
    scoring = Scoring(pool, chosen, cache, scores)
    scorer_handlers = Scorer(chosen, cache, scores, scoring)
    handlers: dict[str, Any] = {
        "trajectories": scorer_handlers.on_trajectory,
        "rewards": scorer_handlers.on_reward,
        "feedback": scorer_handlers.on_feedback,
    }
    service = Service(tables=schema.stream, handlers=handlers, package="headrace_scorer")
    stream: Bench
    async with bench(service, url, data_dir, ManualClock()) as stream:
        yield LearnedRig(stream, scoring, pool, chosen, learned, scorer_handlers, scores)


def run(number: int) -> Trajectory:
    return closed(ask([user(f"q{number}")], session=str(number)), session=str(number))


def thumb(about: Trajectory, value: float | None, *, name: str = "first", **more: Any) -> Feedback:
    fields = {"time": START, "feedback_id": f"{about.session_id}-{name}", "session_key": about.session_key}
    return Feedback.model_validate({**fields, "msg_ids": about.turn_ids, "value": value, **more})


async def test_it_speaks_of_runs_that_nobody_spoke_of_once_it_has_learned(database_url: str, data_dir: Path) -> None:
    runs = [run(number) for number in range(40)]
    async with learning(database_url, data_dir, quality, peeks) as rig:
        await rig.deliver(*runs)
        assert set(rig.latest_rewards().values()) == {("abstained", None)}, "nothing was learned yet"
        await rig.end_waiting()
        assert {item.no_reward for item in rig.stream.sent(Experience)} == {"no_reward"}
        await rig.deliver(
            *(thumb(item, float(int(item.session_id) % 2 == 0), rater=item.session_id) for item in runs[:30])
        )
        await rig.refit()
        while await _waits(rig):
            await rig.stream.step(rig.made.rematch)
            await rig.run_functions()
        for item in runs[30:]:
            outcome, value = rig.latest_rewards()[item.trajectory_id]
            assert outcome == "scored"
            assert value is not None
            assert (value > 0.6) if quality(item) > 0.5 else (value < 0.4)
        last = {item.trajectory_id: item for item in rig.stream.sent(Experience)}
        assert all(last[item.trajectory_id].reward == rig.latest_rewards()[item.trajectory_id][1] for item in runs[30:])
        assert {last[item.trajectory_id].revision for item in runs[30:]} == {1}, "old traffic is scored anew once"
        async with rig.stream.processor.database.transaction() as tx:
            fitted = await rig.learned.fitted(tx, "default")
        assert fitted is not None
        assert not [name for name in fitted.facts()["weights"] if "peeks" in name]  # type: ignore[attr-defined]


async def _waits(rig: LearnedRig) -> bool:
    async with rig.stream.processor.database.transaction() as tx:
        return bool(await tx.scalar(schema.trajectories.select().where(schema.REMATCH).limit(1)))


async def test_what_is_taken_back_teaches_nothing_and_equal_thumbs_give_an_equal_model(
    database_url: str, data_dir: Path
) -> None:
    runs = [run(number) for number in range(24)]
    ids = []
    async with learning(database_url, data_dir, quality) as rig:
        await rig.deliver(*runs)
        await rig.deliver(*(thumb(item, float(int(item.session_id) % 2 == 0)) for item in runs))
        for withdrawn in (None, True, False):
            about = runs[0]
            if withdrawn is not None:
                value = None if withdrawn else 1.0
                await rig.deliver(thumb(about, value, name=f"again {withdrawn}", withdrawn=withdrawn))
            await rig.refit()
            async with rig.stream.processor.database.transaction() as tx:
                fitted = await rig.learned.fitted(tx, "default")
            assert fitted is not None
            ids.append((fitted.model_id, fitted.facts()["thumbs"]))
    assert [count for _, count in ids] == [24, 23, 24]
    assert ids[0][0] == ids[2][0] != ids[1][0]


async def test_it_speaks_after_those_who_are_waited_for(database_url: str, data_dir: Path) -> None:
    async with learning(database_url, data_dir, quality, expected=["feedback"]) as rig:
        first, other = run(0), run(1)
        await rig.deliver(first, other)
        assert rig.latest_rewards() == {}, "people are waited for"
        await rig.deliver(thumb(first, 1.0))
        assert rig.latest_rewards() == {first.trajectory_id: ("abstained", None)}
        await rig.end_waiting()
        assert rig.latest_rewards().keys() == {first.trajectory_id, other.trajectory_id}, "as long as the settings say"


async def test_a_tenant_learns_from_its_own_people_alone(database_url: str, data_dir: Path) -> None:
    other_runs = [item.model_copy(update={"tenant": "other"}) for item in map(run, range(24))]
    async with learning(database_url, data_dir, quality) as rig:
        await rig.deliver(*other_runs)
        await rig.deliver(*(thumb(item, 1.0, tenant="other") for item in other_runs))
        await rig.refit()
        async with rig.stream.processor.database.transaction() as tx:
            assert await rig.learned.fitted(tx, "default") is None
            assert await rig.learned.fitted(tx, "other") is not None


async def test_what_is_said_of_a_run_is_revised_when_it_changes_enough(database_url: str, data_dir: Path) -> None:
    async with learning(database_url, data_dir, quality, learned={"change_min": 1.0}) as rig:
        runs = [run(number) for number in range(24)]
        await rig.deliver(*runs)
        await rig.deliver(*(thumb(item, float(int(item.session_id) % 2 == 0)) for item in runs))
        await rig.refit()
        count = len([item for item in rig.stream.sent(Reward) if item.source == SOURCE])
        await rig.deliver(thumb(runs[0], 0.0, name="changed"))
        await rig.refit()
        assert len([item for item in rig.stream.sent(Reward) if item.source == SOURCE]) == count


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match=r"no installed package announces the reward model 'thumps'.*thumbs"):
        ScorerSettings.model_validate({"learned": {"model": "thumps"}})
