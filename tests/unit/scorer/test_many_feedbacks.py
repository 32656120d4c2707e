"""Tests of many feedbacks about one run: each costs about as much as the first, and the newest count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from headrace_schemas import Experience, Feedback, Reward, Turn
from headrace_scorer import feedback_matching, ledger
from headrace_scorer.feedback_matching import FeedbackPosition, newest
from tests.support.turns import ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, answer, rematch_of
from tests.unit.scorer.test_rescoring import feedback_about, run, scored

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
