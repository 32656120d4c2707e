"""What an account says of its branches, revision by revision."""

from __future__ import annotations

import pytest

from headrace_schemas import RewardPart
from headrace_scorer.accounts import Account, _experiences, _ready
from headrace_scorer.ledger import Entries
from headrace_scorer.policy import Policy, Verdict
from tests.support.streams import START
from tests.support.trajectories import closed

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
