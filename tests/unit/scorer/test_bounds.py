"""Tests of limits in the scorer: value limits, and the cost of many feedbacks about one run.

The events that the scorer derives from accepted events are valid, however many events are combined. A value outside the
declared range of its source does not count, and its source is named.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import update

from headrace_schemas import DeadLetter, Experience, Feedback, Reward, Trajectory, Turn
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, SCORE_MAX, TOTAL_MAX, WEIGHT_MAX
from headrace_scorer import feedback_matching, ledger, schema
from headrace_scorer.feedback_matching import FeedbackPosition, newest
from headrace_scorer.reward_policy import PARTS_MAX, RewardPolicy, SourceReward
from headrace_scorer.settings import ScorerSettings
from tests.support.turns import ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, answer, half, rematch_of
from tests.unit.scorer.test_rescoring import feedback_about, run, scored
from tests.unit.scorer.test_scorer import reward


def many_parts(session: str, first: int, value: float = 1.0, count: int = 32, **fields: Any) -> Feedback:
    return feedback(
        session=session, value=None, parts={f"metric-{n:03d}": value for n in range(first, first + count)}, **fields
    )


async def test_more_sources_than_an_experience_holds_are_counted_by_a_fixed_rule_and_named(open_scorer: Open) -> None:
    async with open_scorer(half, weights={"function:*": 2.0, "judge:*": 3.0, "*": 1.0}, required=["judge:*"]) as rig:
        run = closed(ask([user("q")], session="s"))
        await rig.deliver(many_parts("s", 0), many_parts("s", 32), run)
        await rig.deliver(reward(run, "judge:tone", 0.25), reward(run, "other"))
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["too_many_sources"], "the 65th open source"
        last = rig.stream.sent(Experience)[-1]
        assert len(last.parts) == PARTS_MAX
        assert {"function:half", "judge:tone"} <= {part.source for part in last.parts}
        assert last.parts_left_out == ("feedback:metric-062", "feedback:metric-063")
        assert last.reward == pytest.approx(sum(part.value * part.weight for part in last.parts))


@given(
    st.lists(st.tuples(st.integers(0, 200), st.floats(-SCORE_MAX, SCORE_MAX)), min_size=1, max_size=150),
    st.dictionaries(st.sampled_from(["s-1*", "s-2*", "s-00*"]), st.floats(0, WEIGHT_MAX), max_size=3),
    st.sampled_from(["mean", "sum"]),
    st.randoms(use_true_random=False),
)
def test_a_reward_of_any_sources_fits_an_experience_in_any_order(
    values: list[tuple[int, float]], weights: dict[str, float], combine: Any, order: random.Random
) -> None:
    policy = RewardPolicy({**weights, "*": 1.0}, required=["s-199"] if len(values) > 99 else (), combine=combine)
    sources = [SourceReward(f"s-{n:03d}", None, "scored", value) for n, value in dict(values).items()]
    branch_reward = policy.branch_reward(sources, ["t"], rewarded=False)
    order.shuffle(sources)
    assert policy.branch_reward(sources, ["t"], rewarded=False) == branch_reward
    if branch_reward.reward is None:
        return
    assert abs(branch_reward.reward) <= TOTAL_MAX
    counted = [part.source for part in branch_reward.parts]
    assert len(counted) <= PARTS_MAX
    weighty = {item.source for item in sources if policy.weight(item.source)}
    assert len(weighty - set(counted)) == max(0, len(weighty) - PARTS_MAX)
    assert set(branch_reward.left_out) <= weighty - set(counted)
    assert bool(branch_reward.left_out) == bool(weighty - set(counted))
    least = min(policy.weight(source) for source in counted)
    assert all(policy.weight(source) <= least for source in weighty - set(counted) - {"s-199"})
    assert branch_reward.reward == pytest.approx(
        math.fsum(part.value * part.weight for part in branch_reward.parts), abs=1e-3
    )


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
async def test_scores_at_their_bounds_become_experiences(open_scorer: Open, combine: str, sign: float) -> None:
    async with open_scorer(combine=combine, weights={"*": WEIGHT_MAX}) as rig:
        events = [feedback(session="s", value=sign * SCORE_MAX, rater=f"r-{n}") for n in range(5)]
        await rig.deliver(
            *events, many_parts("s", 0, sign * SCORE_MAX, rater="a"), closed(ask([user("q")], session="s"))
        )
        await rig.pass_time(700)
        (experience,) = rig.stream.sent(Experience)
        assert experience.reward is not None
        assert math.copysign(1.0, experience.reward) == sign
        assert rig.stream.sent(DeadLetter) == []


def context_keys(trajectory: Trajectory, context: dict[str, Any]) -> dict[str, float]:
    return {"value": float(len(context)), "newest": float(context["k-7-7"])}


async def test_the_facts_of_many_feedbacks_stay_within_one_context(open_scorer: Open) -> None:
    async with open_scorer(context_keys) as rig:
        for n in range(8):
            facts = {f"k-{n}-{m}": n * 10 + m for m in range(60)}
            await rig.deliver(feedback(session="s", value=None, context={**facts, "k-7-7": n}))
        await rig.deliver(closed(ask([user("q")], session="s")))
        (reward,) = rig.stream.sent(Reward)
        assert (reward.value, reward.criteria) == (float(CONTEXT_KEYS_MAX), {"newest": 7.0})


@pytest.mark.parametrize(
    "source", ["judge:tone", "function:half", "learned:thumbs", "feedback", "feedback:tone", "Judge"]
)
@pytest.mark.parametrize("producer", ["headrace/gateway", "somebody", "headrace/judge2", "HEADRACE/judge"])
async def test_nobody_else_gives_rewards_in_the_name_of_a_service(
    open_scorer: Open, source: str, producer: str
) -> None:
    async with open_scorer(half) as rig:
        run = closed()
        await rig.deliver(run)
        forged = reward(run, source, 1.0, revision=7)
        await rig.stream.deliver(rig.stream.append("rewards", forged.to_json(), forged, producer=producer))
        (letter,) = rig.stream.sent(DeadLetter)
        assert letter.reason == "reserved_source"
        assert [experience.reward for experience in rig.stream.sent(Experience)] == [0.5]


async def test_a_revision_that_leaves_no_room_for_later_ones_is_refused(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        run = closed()
        await rig.deliver(run, reward(run, "other", 1.0, revision=2**31 - 1), reward(run, "other", 0.5, revision=3))
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["invalid_event"]
        await rig.pass_time(700)
        assert rig.stream.sent(Experience)[-1].reward == 0.5


@pytest.mark.parametrize(
    "change", [{"value": 1e7}, {"value": 1.7e308}, {"source": "judge:tone"}, {"context": {"x": [0] * 40_000}}]
)
async def test_feedback_that_an_older_release_stored_against_the_rules_of_today_does_not_stop_its_run(
    open_scorer: Open, change: dict[str, Any]
) -> None:
    async with open_scorer() as rig:
        old, good = feedback(session="s", value=1.0), feedback(session="s", value=0.25, rater="b")
        await rig.deliver(old, good)
        payload = json.dumps({**json.loads(old.to_json()), **change}).encode()
        table = schema.feedback
        async with rig.stream.processor.database.transaction() as tx:
            await tx.execute(update(table).where(table.c.event_id == old.event_id).values(payload=payload))
        await rig.deliver(closed(ask([user("q")], session="s")))
        await rig.pass_time(700)
        expected = 0.25 if "context" not in change else 0.625
        assert [experience.reward for experience in rig.stream.sent(Experience)] == [expected]


async def test_stored_text_that_is_refused_today_is_cleaned(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        old = feedback(session="s", value=1.0, comment="a comment")
        await rig.deliver(old)
        payload = old.to_json().replace(b"a comment", b"a\\u0000comment")
        async with rig.stream.processor.database.transaction() as tx:
            await tx.execute(update(schema.feedback).values(payload=payload))
        await rig.deliver(closed(ask([user("q")], session="s")))
        (reward,) = rig.stream.sent(Reward)
        assert (reward.value, reward.reason) == (1.0, "a\ufffdcomment")


RANGES = {"feedback": (0.0, 1.0), "feedback:*": (0.0, 5.0), "stars": (1.0, 5.0), "function:*": (-1.0, 1.0)}


def test_the_first_pattern_that_fits_counts() -> None:
    settings = ScorerSettings(ranges=RANGES)
    seed = 8
    print(f"seed {seed}")
    chance = random.Random(seed)
    for source, (low, high) in (("feedback", (0, 1)), ("feedback:tone", (0, 5)), ("stars", (1, 5))):
        for _ in range(50):
            assert settings.violation(source, chance.uniform(low, high)) is None
            outside = chance.choice((low - 10 ** chance.uniform(-9, 6), high + 10 ** chance.uniform(-9, 6)))
            assert f"{source} = " in (settings.violation(source, outside) or "")
        assert settings.violation(source, low) is settings.violation(source, high) is None
    assert settings.violation("judge:r", 1e6) is None
    assert settings.violation("feedback", None) is None


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_without_room_is_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValidationError):
        ScorerSettings(ranges={"feedback": limits})


async def test_feedback_and_rewards_outside_their_range_are_dead_lettered_by_name(open_scorer: Open) -> None:
    trajectory = closed()
    async with open_scorer(ranges=RANGES) as rig:
        await rig.deliver(trajectory)
        await rig.deliver(feedback(value=100.0), reward(trajectory, "stars", value=50.0))
        letters = rig.stream.sent(DeadLetter)
        assert [letter.reason for letter in letters] == ["out_of_range", "out_of_range"]
        assert "feedback = 100: must be from 0 to 1 (scorer.ranges)" in letters[0].error
        assert "stars = 50: must be from 1 to 5 (scorer.ranges)" in letters[1].error
        assert rig.experiences() == []
        await rig.deliver(feedback(value=1.0), reward(trajectory, "stars", value=5.0))
        assert rig.experiences()[-1][2] == 3.0
        assert len(rig.stream.sent(DeadLetter)) == 2


async def test_a_reward_function_outside_its_range_has_failed(open_scorer: Open) -> None:
    def percent() -> float:
        return 85.0

    async with open_scorer(percent, ranges=RANGES) as rig:
        await rig.deliver(closed())
        await rig.run_functions()
        assert rig.rewards() == [("function:percent", 0, "failed", None)]
        (source,) = rig.scoring.sources.source_list().data
    assert "function:percent = 85: must be from -1 to 1" in (source.last_error or "")


EVENTS = 8
KINDS = ("revised", "by many people", "listing turns", "about the task")


def event(kind: str, number: int, turn: Turn) -> Feedback:
    value, name = number / 100, f"f{number}"
    if kind == "listing turns":
        return feedback("s", turn, value=value, feedback_id=name)
    if kind == "about the task":
        return feedback("any", value=value, feedback_id=name, level="task", task_id="t", partition=0)
    return feedback("s", value=value, feedback_id=name, rater=name if kind == "by many people" else None)


def position(offset: int, size_bytes: int = 100, value_count: int = 1) -> FeedbackPosition:
    return FeedbackPosition(f"f{offset}", offset, 0, 0, size_bytes, value_count)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_feedback_reads_no_more_than_a_bounded_number_of_earlier_ones(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise each revision costs as much as all before it together, and 10,000 of them stop the scorer for hours."""
    monkeypatch.setattr(feedback_matching, "EVENTS_MAX", EVENTS)
    monkeypatch.setattr(ledger, "_PLACED_BY_TIME_MAX", EVENTS)
    parsed, rows = Counter[int](), Counter[int]()
    number = 0
    from_stored, of_rows = Feedback.from_stored, ledger.LedgerEntries.__init__

    def counted(payload: bytes) -> Feedback:
        parsed[number] += 1
        return from_stored(payload)

    def read(entries: ledger.LedgerEntries, read_rows: Sequence[ledger.Row] = ()) -> None:
        rows[number] += len(read_rows)
        of_rows(entries, read_rows)

    monkeypatch.setattr(Feedback, "from_stored", counted)
    monkeypatch.setattr(ledger.LedgerEntries, "__init__", read)
    turn = ask([user("q")])
    async with open_scorer(answer) as rig:
        await rig.deliver(closed(turn, task_id="t"))
        for number in range(4 * EVENTS):
            await rig.deliver(event(kind, number, turn))
            await rig.stream.step(rematch_of(rig))
        assert max(parsed.values()) <= 3 * EVENTS, "a function also reads the feedback of its job"
        assert parsed[4 * EVENTS - 1] <= parsed[2 * EVENTS]
        assert max(rows.values()) <= 8


async def test_the_newest_feedback_counts_in_the_stream_and_in_a_replay(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_matching, "EVENTS_MAX", EVENTS)
    about = run("s")
    opinions = [
        feedback_about(about, n / 100, at=float(n), rater=f"r{n}", feedback_id=f"f{n}") for n in range(3 * EVENTS)
    ]
    expected = sum(range(2 * EVENTS, 3 * EVENTS)) / 100 / EVENTS
    async with open_scorer() as rig:
        await rig.deliver(about, *opinions)
        assert rig.stream.sent(Experience)[-1].reward == pytest.approx(expected)
    experiences, _, _ = await scored(*opinions, about)
    assert experiences[-1].reward == pytest.approx(expected)


def test_newest_is_bounded_by_number_bytes_and_values_and_never_empty() -> None:
    assert [item.offset for item in newest(position(n) for n in range(1000))] == list(range(744, 1000))
    assert [item.offset for item in newest(position(n, size_bytes=3 << 20) for n in range(9))] == [7, 8]
    assert [item.offset for item in newest(position(n, value_count=4096) for n in range(20))] == list(range(12, 20))
    assert newest([position(1, size_bytes=64 << 20)]) == [position(1, size_bytes=64 << 20)]
    assert newest([]) == []


async def test_a_long_comment_is_not_repeated_in_each_reward(open_scorer: Open) -> None:
    """3,200 rewards with a comment of 1 MB would be 3.2 GB in one transaction."""
    turns = [ask([user(f"q{n}")]) for n in range(11)]
    async with open_scorer() as rig:
        await rig.deliver(closed(*turns))
        opinion = feedback(
            "s", *turns[:10], value=None, level="turn", parts={f"p{n}": 0.5 for n in range(8)}, comment="x" * 100_000
        )
        await rig.deliver(opinion)
        rewards = [reward for reward in rig.stream.sent(Reward) if reward.source.startswith("feedback")]
        assert len(rewards) == 80
        size = sum(len(reward.to_json()) for reward in rewards)
        assert size < 2 * len(opinion.to_json())
        assert {str(reward.reason)[-26:] for reward in rewards} == {"x... (99000 more characters)"[-26:]}


async def test_a_revised_entry_is_read_once_and_its_history_stays(open_scorer: Open) -> None:
    turn = ask([user("q")])
    async with open_scorer() as rig:
        about = closed(turn)
        await rig.deliver(about, *(event("revised", number, turn) for number in range(20)))
        async with rig.stream.processor.database.transaction() as tx:
            entries = (await ledger.read(tx, {about.trajectory_id: about.tenant}))[about.trajectory_id]
            history = await ledger.history(tx, about.trajectory_id)
        assert [(row["revision"], row["value"]) for row in entries.rewards()] == [(19, 0.19)]
        assert [row["revision"] for row in history] == list(range(20))
