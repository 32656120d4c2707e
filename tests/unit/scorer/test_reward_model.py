"""Tests of the reward model `thumbs`: its fit, its refusals, and raters that it ignores.

The scorer fits the model in the background as thumbs arrive, and scores runs without thumbs.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks._thumbs_world import People, runs, thumbed
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_scorer import schema, upkeep
from headrace_scorer.handlers import Scorer
from headrace_scorer.judge_monitor import JudgeMonitor
from headrace_scorer.learned import columns, crowd, refitting
from headrace_scorer.learned.models import FitRequirements, Thumb, ThumbedRun
from headrace_scorer.learned.refitting import LearnedSource
from headrace_scorer.learned.thumbs import fit, read
from headrace_scorer.scores import ScoreStore
from headrace_scorer.scoring import Scoring
from headrace_scorer.settings import ScorerSettings
from headrace_scorer.store import TrajectoryCache
from tests.support.streams import Bench, ManualClock, Service, bench
from tests.support.turns import START, ask, closed, user
from tests.unit.scorer.conftest import LocalPool, Rig

DEMANDS = FitRequirements(thumbs_min=20)


def thumbed_runs(seed: int = 1, count: int = 400, **people: object) -> list[ThumbedRun]:
    return thumbed(seed, runs(seed, count), People(**{"share": 1.0, **people}))[0]  # type: ignore[arg-type]


def separable_runs(count: int, *raters: str) -> list[ThumbedRun]:
    """Return `count` runs. Every second run is good and has a better feature, and all raters rate correctly."""
    thumbed = []
    for number in range(count):
        thumbs = tuple(Thumb(rater, float(number % 2)) for rater in raters)
        noise = random.Random(number).random() / 10
        thumbed.append(ThumbedRun(f"t{number}", {"judge:help": 0.4 + 0.2 * (number % 2) + noise}, thumbs))
    return thumbed


def test_the_fit_is_the_maximum_of_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood of a thumb is a mixture over the latent quality.

    Its finite differences are computed independently.
    """
    training_runs = [
        replace(run, thumbs=(*run.thumbs, Thumb("second", 1.0 - (n % 3 == 0)))) for n, run in enumerate(thumbed_runs())
    ]
    selected, _ = columns.columns_of([run.features for run in training_runs], [])
    table = columns.feature_table(selected, [run.features for run in training_runs])
    thumbs, prior = crowd.thumbs_of(training_runs, 1.0), np.full(len(selected), 0.1)
    monkeypatch.setattr(crowd, "_ROUNDS_MAX", 2000)  # to the end, however slowly it comes nearer
    fitted = crowd.fit(table, thumbs, prior, 2.0)
    right = dict(zip(thumbs.raters, fitted.right_A.tolist(), strict=True))

    def objective(weights: np.ndarray) -> float:
        total = -(0.1 * weights[0] ** 2 + 2.0 * float(((weights[1:] - prior) ** 2).sum())) / 2
        for row, run in zip(table, training_runs, strict=True):
            good = 1 / (1 + math.exp(-float(weights[0] + row @ weights[1:])))
            up, down = good, 1 - good
            for thumb in run.thumbs:
                up *= right[thumb.rater] if thumb.value else 1 - right[thumb.rater]
                down *= 1 - right[thumb.rater] if thumb.value else right[thumb.rater]
            total += math.log(up + down)
        return float(total)

    for at in range(len(fitted.weights_D)):
        step = np.zeros(len(fitted.weights_D))
        step[at] = 1e-4
        slope = (objective(fitted.weights_D + step) - objective(fitted.weights_D - step)) / 2e-4
        assert abs(slope) < 0.02, at


def test_it_comes_back_as_it_was_and_order_makes_no_difference() -> None:
    training_runs, unrated = thumbed_runs(count=200), [run.features for run in runs(2, 80)]
    fitted = fit(training_runs, unrated, DEMANDS)
    again = fit(training_runs[::-1], unrated[::-1], DEMANDS)
    assert fitted.fit_facts.silent is None
    assert again.to_json() == fitted.to_json()
    assert read(fitted.to_json()) == fitted
    assert read(fitted.to_json()).judge(unrated[0]) == fitted.judge(unrated[0])


def test_it_is_silent_with_few_thumbs_and_where_thumbs_say_nothing() -> None:
    assert "10 thumbs; at least 20 are required" in str(fit(separable_runs(10, "a"), [], DEMANDS).fit_facts.silent)
    chance = random.Random(0)
    noise = [
        replace(thumbed_run, thumbs=(Thumb("a", float(chance.random() < 0.5)),))
        for thumbed_run in separable_runs(60, "a")
    ]
    assert "chance" in str(fit(noise, [], DEMANDS).fit_facts.silent)
    assert fit(noise, [], DEMANDS).judge(noise[0].features) is None


def test_thumbs_that_are_swapped_are_noticed() -> None:
    """No source may get a negative weight if all raters agree with it."""
    swapped = [
        replace(thumbed_run, thumbs=(Thumb("a", 1 - thumbed_run.thumbs[0].value),))
        for thumbed_run in separable_runs(60, "a")
    ]
    fitted = fit(swapped, [], DEMANDS)
    likely = fitted.judge({"judge:help": 0.65})
    assert likely is None or likely.value < 0.5, "it says what people say, and never the contrary of it"


def test_it_abstains_of_what_it_has_not_seen_enough_of() -> None:
    usual_runs = separable_runs(60, "a")
    rare_runs = [replace(usual_run, features={**usual_run.features, "rare": 1.0}) for usual_run in usual_runs[:2]]
    training_runs = [*rare_runs, *usual_runs[2:]]
    wide = fit(training_runs, [], replace(DEMANDS, width_max=1.0))
    usual, rare = wide.judge({"judge:help": 0.55}), wide.judge({"judge:help": 0.55, "rare": 1.0})
    assert usual is not None
    assert rare is not None
    assert _log_odds(rare.high) - _log_odds(rare.low) > _log_odds(usual.high) - _log_odds(usual.low)
    assert usual.high - usual.low > 0.05
    assert replace(wide, requirements=replace(DEMANDS, width_max=0.05)).judge({"judge:help": 0.55}) is None


def _log_odds(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize("of_others", [{}, {"function:leak": 0.5}])
def test_what_was_made_of_the_thumb_is_refused(of_others: dict[str, float]) -> None:
    training_runs = [
        replace(thumbed_run, features={**thumbed_run.features, "function:leak": thumbed_run.thumbs[0].value})
        for thumbed_run in separable_runs(60, "a")
    ]
    unrated = [{**thumbed_run.features, **of_others} for thumbed_run in separable_runs(80, "a")]
    fitted = fit(training_runs, unrated, DEMANDS)
    assert fitted.fit_facts.refused == ("function:leak",)
    assert all(column.name != "function:leak" for column in fitted.columns)


def lengthy(count: int, *, judged: bool = True) -> list[ThumbedRun]:
    """Return runs in which people and a judge prefer length. The rest of the judge's score is noise."""
    draw = random.Random(5)
    thumbed = []
    for number in range(count):
        turns, noise = draw.gauss(2, 1), draw.gauss(0, 1)
        features = {"run/turns": turns, **({"judge:help/warmth": turns + noise} if judged else {})}
        thumb = Thumb(f"u{number % 50}", float(turns + draw.gauss(0, 0.5) > 2))
        thumbed.append(ThumbedRun(f"t{number}", features, (thumb,)))
    return thumbed


def test_what_the_agent_controls_is_learned_and_not_paid() -> None:
    fitted = fit(lengthy(400), [], replace(DEMANDS, width_max=1.0))
    short, long = (fitted.judge({"judge:help/warmth": 2.0, "run/turns": turns}) for turns in (1.0, 3.0))
    assert short is not None
    assert long is not None
    assert long.value - short.value > 0.3, "what it believes"
    assert long.paid == short.paid
    all_paid = fit(lengthy(400), [], replace(DEMANDS, width_max=1.0, controlled=()))
    paid = all_paid.judge({"judge:help/warmth": 2.0, "run/turns": 3.0})
    assert paid is not None
    assert paid.paid == paid.value == long.value


def test_nothing_else_is_credited_for_what_the_agent_controls() -> None:
    """A judge that prefers length must not be credited if length is only hidden from the model."""

    def pays(*, hidden: bool) -> float:
        training_runs = [
            replace(
                thumbed_run,
                features={k: v for k, v in thumbed_run.features.items() if not (hidden and k == "run/turns")},
            )
            for thumbed_run in lengthy(400)
        ]
        fitted = fit(training_runs, [], replace(DEMANDS, width_max=1.0))
        low, high = fitted.judge({"judge:help/warmth": 1.0}), fitted.judge({"judge:help/warmth": 3.0})
        assert low is not None
        assert high is not None
        return high.paid - low.paid

    assert pays(hidden=False) < pays(hidden=True) / 2


def test_it_is_silent_where_the_agent_controls_all_that_it_sees() -> None:
    assert "controls" in str(fit(lengthy(100, judged=False), [], DEMANDS).fit_facts.silent)
    assert fit(lengthy(100, judged=False), [], replace(DEMANDS, controlled=())).fit_facts.silent is None


def test_who_contradicts_everybody_is_not_heard() -> None:
    training_runs = separable_runs(120, "a", "b")
    poisoned = [
        replace(item, thumbs=(*item.thumbs, Thumb("x", 1 - item.thumbs[0].value))) if n % 2 else item
        for n, item in enumerate(training_runs)
    ]
    sound, fitted = fit(training_runs, [], DEMANDS), fit(poisoned, [], DEMANDS)
    assert fitted.fit_facts.unheard == ("x",)
    for score in (0.45, 0.65):
        item, other = sound.judge({"judge:help": score}), fitted.judge({"judge:help": score})
        assert item is not None
        assert other is not None
        assert abs(item.value - other.value) < 0.1


def test_nobody_with_a_name_weighs_more_than_his_share() -> None:
    training_runs = [
        replace(thumbed_run, thumbs=(Thumb("busy" if n % 2 else f"u{n}", 1.0),))
        for n, thumbed_run in enumerate(separable_runs(100, "a"))
    ]
    thumbs = crowd.thumbs_of(training_runs, 0.1)
    weights = np.bincount(thumbs.rater_T, weights=thumbs.weight_T)
    assert weights[thumbs.raters.index("busy")] == pytest.approx(10.0)
    assert weights.sum() == pytest.approx(60.0)
    nameless = crowd.thumbs_of(separable_runs(100, ""), 0.1)
    assert nameless.weight_T.sum() == 100.0, "people without a name are many"


SOURCE = "learned:thumbs"


def quality(trajectory: Trajectory) -> float:
    """Return a high score for runs with an even name, which are the good ones."""
    return 0.8 if int(trajectory.session_id) % 2 == 0 else 0.2


def peeks(feedback: Sequence[Feedback]) -> float | None:
    """Return the thumb itself, which must never become a feature."""
    return next((event.value for event in feedback), None)


@dataclass
class LearnedRig(Rig):
    """Rig with the parts of the reward model."""

    learned: LearnedSource
    made: Scorer
    scores: ScoreStore

    async def refit(self) -> None:
        """Fit the models with new thumbs, and rescore the runs that change."""
        await refitting.refit(self.learned, self.stream.processor)
        await self.stream.step(self.made.rematch)
        await self.run_functions()

    async def emit_overdue(self) -> None:
        self.stream.clock.advance(self.settings.reward_wait_s + 1)
        for _ in range(2):  # 25 at a time
            await self.stream.step(lambda tx, now: upkeep.emit_overdue(tx, now, self.scores, self.scoring.policy))

    def latest_rewards(self) -> dict[str, tuple[str, float | None]]:
        """Return the outcome and value of the reward model's latest reward for each session."""
        rewards = [reward for reward in self.stream.sent(Reward) if reward.source == SOURCE]
        return {
            reward.trajectory_id: (reward.outcome, reward.value)
            for reward in sorted(rewards, key=lambda reward: reward.revision)
        }


@pytest.fixture(autouse=True)
def _refit_after_each_thumb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_scorer.learned.refitting.REFIT_SHARE", 0.0)


@contextlib.asynccontextmanager
async def learning(url: str, data_dir: Path, *functions: Any, **settings: Any) -> AsyncIterator[LearnedRig]:
    learned_settings = {"model": "thumbs", "thumbs_min": 20, **settings.pop("learned", {})}
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
        await rig.emit_overdue()
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
        await rig.emit_overdue()
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


async def test_what_is_said_of_a_run_is_revised_when_it_changes_enough(
    database_url: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_scorer.learned.refitting.CHANGE_MIN", 1.0)
    async with learning(database_url, data_dir, quality) as rig:
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
