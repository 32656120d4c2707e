"""What an account says of its branches, revision by revision."""

from __future__ import annotations

from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from headrace_schemas import RewardPart
from headrace_scorer.accounts import Account, _experiences, _ready
from headrace_scorer.ledger import Entries
from headrace_scorer.policy import Policy, Verdict
from tests.support.streams import START
from tests.support.trajectories import closed
from tests.unit.scorer.conftest import Open, half
from tests.unit.scorer.test_scorer import reward

MINE = Policy({"*": 1.0}, expected=["mine"])


class Said(Entries):
    """Entries whose verdicts the test sets."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.now = list(verdicts)

    def verdicts(self) -> list[Verdict]:
        return self.now


def account(*verdicts: Verdict) -> Account:
    row = {
        "emitted": "[]", "task_id": None, "run_id": None, "parts": 1, "settle_ms": 1, "inputs": "", "scored_inputs": "",
    }  # fmt: skip
    return Account(closed(), row, Said(*verdicts))


def say(book: Account, *verdicts: Verdict) -> list[tuple[int, float | None, str | None]]:
    """Revision, reward and why there is none, of what follows."""
    assert isinstance(book.entries, Said)
    book.entries.now = list(verdicts)
    return [(made.revision, made.reward, made.no_reward) for made in _experiences(book, START, MINE)]


def test_a_branch_that_was_rewarded_once_stays_withdrawn_whatever_changes_beside_it() -> None:
    book = account()
    gone = Verdict("mine", None, "withdrawn", None)
    assert say(book, Verdict("mine", None, "scored", 1.0)) == [(0, 1.0, None)]
    assert say(book, gone) == [(1, None, "withdrawn")]
    book.change(task_id="t")
    assert say(book, gone) == [(2, None, "withdrawn")], "its weights may hold it, so the trainer has to hear it again"
    assert say(book, gone) == []


def test_a_branch_that_never_was_is_not_withdrawn() -> None:
    book = account()
    assert say(book, Verdict("mine", None, "failed", None)) == [(0, None, "no_reward")]
    book.change(task_id="t")
    assert say(book, Verdict("mine", None, "failed", None)) == [(1, None, "no_reward")]
    assert say(book, Verdict("mine", None, "scored", 0.0))[0][:2] == (2, 0.0), "a zero is a reward"
    assert say(book, Verdict("mine", None, "failed", None)) == [(3, None, "withdrawn")]


def test_parts_say_who_made_the_reward() -> None:
    book = account(Verdict("mine", None, "scored", 0.5))
    (made,) = _experiences(book, START, MINE)
    assert made.parts == (RewardPart(source="mine", value=0.5, weight=1.0),)


@pytest.mark.parametrize("emitted", ["[]", '[{"revision": 0}]'])
def test_nothing_is_ready_while_functions_have_not_seen_the_newest_feedback(emitted: str) -> None:
    policy = Policy({"*": 1.0}, functions=["function:a"])
    book = account(Verdict("function:a", None, "scored", 1.0))
    book.change(emitted=emitted, inputs="new", scored_inputs="old")
    assert not _ready(book, policy)
    book.change(scored_inputs="new")
    assert _ready(book, policy)


async def test_functions_that_missed_the_end_of_waiting_are_not_waited_for_again(open_scorer: Open) -> None:
    async with open_scorer(half, settle_s=60) as rig:
        trajectory = closed()
        await rig.stream.deliver(trajectory)
        await rig.pass_time(61)
        assert rig.experiences() == [(0, 0, None, "no_reward")]
        await rig.stream.deliver(reward(trajectory, "judge:x", 1.0))
        assert rig.experiences()[1:] == [(0, 1, 1.0, None)]


def measured(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_scorer_{name}", labels) or 0.0


@pytest.mark.parametrize(("age_s", "seconds"), [(0.25, 0.25), (-3.0, 0.0)])
def test_the_time_to_the_first_experience_is_measured_once(age_s: float, seconds: float) -> None:
    """A negative age comes of clocks that differ."""
    book = account(Verdict("mine", None, "scored", 1.0))
    count, total = measured("experience_seconds_count"), measured("experience_seconds_sum")
    now = book.trajectory.time + timedelta(seconds=age_s)
    assert len(_experiences(book, now, MINE)) == 1
    book.change(task_id="t")
    assert len(_experiences(book, now + timedelta(seconds=100), MINE)) == 1
    assert measured("experience_seconds_count") == count + 1
    assert measured("experience_seconds_sum") == pytest.approx(total + seconds)


def test_experiences_are_counted_by_what_they_say() -> None:
    book = account()
    before = [measured("experiences_total", state=state) for state in ("rewarded", "withdrawn")]
    say(book, Verdict("mine", None, "scored", 1.0))
    say(book, Verdict("mine", None, "withdrawn", None))
    after = [measured("experiences_total", state=state) for state in ("rewarded", "withdrawn")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
