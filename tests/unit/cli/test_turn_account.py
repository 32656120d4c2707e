"""Tests of the account of captured turns: each state and each contradiction, from constructed streams of events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace_operations.turn_account import TurnAccount, turn_account_of
from headrace_schemas import Event, TrainingOutcome
from tests.support.turns import (
    CLOSED,
    READY,
    TWO,
    experience,
    letter,
    report,
    restores,
    trajectory,
    turn,
    undoes,
    verdict,
)


def summary(account: TurnAccount) -> tuple[int, int, dict[str, int], dict[str, int]]:
    assert account.captured == account.trained + sum(account.waiting.values()) + sum(account.dropped.values())
    return account.captured, account.trained, dict(account.waiting), dict(account.dropped)


STATES: dict[str, tuple[tuple[Event, ...], tuple[int, int, dict[str, int], dict[str, int]]]] = {
    "nothing": ((), (0, 0, {}, {})),
    "open session": (TWO, (2, 0, {"session": 2}, {})),
    "no reward yet": (CLOSED, (2, 0, {"reward": 2}, {})),
    "on its way to the trainer": (READY, (2, 0, {"training": 2}, {})),
    "trained": ((*READY, report(verdict("E", "a", "b"))), (2, 2, {}, {})),
    "undone": ((*READY, report(verdict("E", "a", "b")), undoes("E")), (2, 0, {}, {"undone": 2})),
    "undone and queued again": (
        (*READY, report(verdict("E", "a", "b")), undoes("E", queued=True)),
        (2, 0, {"training": 2}, {}),
    ),
    "undone and trained again": (
        (*READY, report(verdict("E", "a", "b")), undoes("E", queued=True), report(verdict("E", "a", "b"), save=2)),
        (2, 2, {}, {}),
    ),
    "undone and too old by then": (
        (
            *READY,
            report(verdict("E", "a", "b")),
            undoes("E", queued=True),
            report(verdict("E", "a", "b", dropped="stale"), save=2),
        ),
        (2, 0, {}, {"stale": 2}),
    ),
    "undone, and the weights come forward again": (
        (*READY, report(verdict("E", "a", "b")), undoes("E", queued=True), restores("E")),
        (2, 2, {}, {}),
    ),
    "restored, whatever was said since": (
        (
            *READY,
            experience("E", "a", "b", revision=1, reward=None),
            report(verdict("E", "a", "b")),
            undoes("E", queued=True),
            report(
                verdict("E", "a", "b", dropped="superseded"),
                verdict("E", "a", "b", revision=1, dropped="no_reward"),
                save=2,
            ),
            restores("E", save=3),
        ),
        (2, 2, {}, {}),
    ),
    "a later word was dropped, and is queued": (
        (
            *READY,
            experience("E", "a", "b", revision=1),
            report(verdict("E", "a", "b"), verdict("E", "a", "b", revision=1, dropped="stale")),
            undoes("E"),
            undoes("E", revision=1, queued=True, save=2),
        ),
        (2, 0, {"training": 2}, {}),
    ),
    "undone and given up, and queued once the weights are others": (
        (*READY, report(verdict("E", "a", "b")), undoes("E"), undoes("E", queued=True, save=2)),
        (2, 0, {"training": 2}, {}),
    ),
    "a correction is undone, what it corrected is not": (
        (
            *READY,
            experience("E", "a", "b", revision=1),
            report(verdict("E", "a", "b")),
            report(verdict("E", "a", "b", revision=1), save=1),
            undoes("E", revision=1, save=2),
        ),
        (2, 2, {}, {}),
    ),
    "excluded": (
        (*READY, report(verdict("E", "a", "b", dropped="withdrawn", detail="excluded"))),
        (2, 0, {}, {"excluded": 2}),
    ),
    "excluded after it was trained": (
        (
            *READY,
            report(verdict("E", "a", "b")),
            undoes("E", queued=True),
            report(verdict("E", "a", "b", dropped="withdrawn", detail="excluded"), save=2),
        ),
        (2, 0, {}, {"excluded": 2}),
    ),
    "stale": ((*READY, report(verdict("E", "a", "b", dropped="stale"))), (2, 0, {}, {"stale": 2})),
    "eval": ((turn("a", purpose="eval"), turn("b")), (2, 0, {"session": 1}, {"eval": 1})),
    "registered": ((turn("a", untrained="registered"), turn("b")), (2, 0, {"session": 1}, {"registered": 1})),
    "registered by its trajectory": (
        (*TWO, trajectory("T", ("a", "b"), untrained="registered")),
        (2, 0, {}, {"registered": 2}),
    ),
    "eval by its trajectory": ((*TWO, trajectory("T", ("a", "b"), purpose="eval")), (2, 0, {}, {"eval": 2})),
    "left out": (
        (*TWO, trajectory("T", ("a",), left_out={"b": "retried"})),
        (2, 0, {"reward": 1}, {"retried": 1}),
    ),
    "refused by the collector": ((*TWO, letter(TWO[0], "collector")), (2, 0, {"session": 1}, {"dead_letter": 1})),
    "refused by the scorer": ((*CLOSED, letter(CLOSED[2], "scorer")), (2, 0, {}, {"dead_letter": 2})),
    "refused by the trainer": ((*READY, letter(READY[3], "trainer")), (2, 0, {}, {"dead_letter": 2})),
    "refused by the judge, which only abstains": ((*CLOSED, letter(CLOSED[2], "judge")), (2, 0, {"reward": 2}, {})),
    "refused, then retried": (
        (*READY, letter(CLOSED[2], "scorer"), report(verdict("E", "a", "b"))),
        (2, 2, {}, {}),
    ),
    "dropped, then revised": (
        (*READY, report(verdict("E", "a", "b", dropped="no_reward")), experience("E", "a", "b", revision=1)),
        (2, 0, {"training": 2}, {}),
    ),
    "superseded, then trained": (
        (
            *READY,
            experience("E", "a", "b", revision=1),
            report(verdict("E", "a", "b", dropped="superseded"), verdict("E", "a", "b", revision=1)),
        ),
        (2, 2, {}, {}),
    ),
    "trained, then revised and dropped": (
        (
            *READY,
            experience("E", "a", "b", revision=1),
            report(verdict("E", "a", "b")),
            report(verdict("E", "a", "b", revision=1, dropped="unchanged"), save=1),
        ),
        (2, 2, {}, {}),
    ),
    "dropped, and more exactly why": (
        (*READY, report(verdict("E", "a", "b", dropped="singleton", detail="unpaired"))),
        (2, 0, {}, {"unpaired": 2}),
    ),
    "two branches, one trained": (
        (
            *TWO,
            trajectory("T", ("a",), ("a", "b")),
            experience("E0", "a"),
            experience("E1", "a", "b"),
            report(verdict("E0", "a", dropped="too_long"), verdict("E1", "a", "b")),
        ),
        (2, 2, {}, {}),
    ),
    "two branches, one still waits": (
        (
            *TWO,
            trajectory("T", ("a",), ("a", "b")),
            experience("E0", "a"),
            experience("E1", "a", "b"),
            report(verdict("E0", "a", dropped="too_long")),
        ),
        (2, 0, {"training": 2}, {}),
    ),
    "ingested": (
        (trajectory("T", ("x",), end_reason="ingest"), experience("E", "x"), report(verdict("E", "x"))),
        (1, 1, {}, {}),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_each_state(name: str) -> None:
    events, expected = STATES[name]
    account = turn_account_of(events)
    assert account.problems == ()
    assert summary(account) == expected


@pytest.mark.parametrize("name", STATES)
def test_order_and_repetition_change_nothing(name: str) -> None:
    events, expected = STATES[name]
    for seed in range(5):
        print(f"seed {seed}")
        shuffled = [*events, *events]
        random.Random(seed).shuffle(shuffled)
        account = turn_account_of(shuffled)
        assert account.problems == ()
        assert summary(account) == expected


CONTRADICTIONS: dict[str, tuple[tuple[Event, ...], str]] = {
    "two trajectories": ((*CLOSED, trajectory("U", ("a",))), "turn a is in two trajectories"),
    "trained on and left out": (
        (*TWO, trajectory("T", ("a", "b"), left_out={"b": "retried"})),
        "both trains on turn b and leaves it out",
    ),
    "one revision trained twice": (
        (*READY, report(verdict("E", "a", "b")), report(verdict("E", "a", "b"), save=1)),
        "experience E revision 0 changed lineage main twice",
    ),
    "one save reported twice, differently": (
        (*READY, report(verdict("E", "a", "b")), report(verdict("E", "a", "b", dropped="stale"))),
        "lineage main reported its save 0 twice, differently",
    ),
    "eval was trained": (
        (turn("a", purpose="eval"), trajectory("T", ("a",)), experience("E", "a"), report(verdict("E", "a"))),
        "turn a is dropped as eval and yet trained",
    ),
    "left out and in an experience": (
        (*TWO, trajectory("T", ("a",), left_out={"b": "retried"}), experience("E", "a", "b")),
        "turn b is dropped as retried and yet waiting in an experience",
    ),
    "undone and never trained": (
        (*READY, report(verdict("E", "a", "b", dropped="stale")), undoes("E")),
        "undid experience E revision 0, which it had not trained",
    ),
    "undone out of nothing": ((*READY, undoes("E", queued=True)), "undid experience E revision 0"),
    "queued twice": (
        (*READY, report(verdict("E", "a", "b")), undoes("E", queued=True), undoes("E", queued=True, save=2)),
        "undid experience E revision 0",
    ),
    "restored and never undone": (
        (*READY, report(verdict("E", "a", "b")), restores("E")),
        "restored experience E revision 0, which it had not undone",
    ),
    "a verdict about nothing": ((*CLOSED, report(verdict("E", "a", "b"))), "which was not published"),
    "a verdict about other turns": ((*READY, report(verdict("E", "a"))), "on experience E that names other turns"),
    "an experience of nothing": ((*TWO, experience("E", "a")), "of trajectory T, which was not published"),
    "an experience of somebody else's turns": (
        (*TWO, turn("c"), trajectory("T", ("a", "b")), trajectory("U", ("c",)), experience("E", "a", "c")),
        "names turns that are not of its trajectory: ['c']",
    ),
    "revisions about different turns": (
        (*READY, experience("E", "a", revision=1)),
        "its revisions are about different turns",
    ),
    "never captured": ((turn("a"), trajectory("T", ("a", "b"))), "turn b was used without having been captured"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_each_contradiction_is_noticed(name: str) -> None:
    events, message = CONTRADICTIONS[name]
    account = turn_account_of(events)
    assert not account.consistent
    assert any(message in problem for problem in account.problems), account.problems
    summary(account)


@pytest.mark.parametrize(
    "missing", ["a verdict about nothing", "an experience of nothing", "never captured", "undone out of nothing"]
)
def test_missing_events_are_no_problem_when_topics_have_lost_their_beginning(missing: str) -> None:
    assert turn_account_of(CONTRADICTIONS[missing][0], complete=False).consistent


@pytest.mark.parametrize("doubled", ["one revision trained twice", "two trajectories", "eval was trained"])
def test_doubles_are_problems_all_the_same(doubled: str) -> None:
    assert not turn_account_of(CONTRADICTIONS[doubled][0], complete=False).consistent


def test_each_lineage_has_its_own_account() -> None:
    events = (
        *READY,
        report(verdict("E", "a", "b"), lineage="main"),
        report(verdict("E", "a", "b", dropped="stale"), lineage="replay", at_s=60),
    )
    latest = turn_account_of(events)
    assert latest.lineages == {"m": "replay"}
    assert summary(latest) == (2, 0, {}, {"stale": 2})
    assert summary(turn_account_of(events, {"m": "main"})) == (2, 2, {}, {})
    assert latest.consistent, "two lineages may train the same experience"


def test_many_problems_are_counted_and_some_are_spelt_out() -> None:
    account = turn_account_of([trajectory(f"T{number}", (f"t{number}",)) for number in range(150)])
    assert (len(account.problems), account.problems_total) == (100, 150)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_history_is_accounted_as_it_was_made(seed: int) -> None:
    """Construct sessions in random known states, and compare the account with the number of turns in each state."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    events: list[Event] = []
    verdicts: list[TrainingOutcome] = []
    expected: dict[str, int] = {}
    for number in range(200):
        ids = tuple(f"{number}-{index}" for index in range(chance.randint(1, 4)))
        state = chance.choice(["session", "reward", "training", "trained", "stale"])
        expected[state] = expected.get(state, 0) + len(ids)
        steps: list[Callable[[], Event]] = [
            lambda ids=ids, number=number: trajectory(f"T{number}", ids),  # type: ignore[misc]
            lambda ids=ids, number=number: experience(f"E{number}", *ids, of=f"T{number}"),  # type: ignore[misc]
        ]
        reached = {"session": 0, "reward": 1, "training": 2, "trained": 2, "stale": 2}[state]
        events += [turn(turn_id) for turn_id in ids]
        events += [step() for step in steps[:reached]]
        if state in ("trained", "stale"):
            verdicts.append(verdict(f"E{number}", *ids, dropped="stale" if state == "stale" else None))
    chance.shuffle(verdicts)
    events += [report(*verdicts[at : at + 10], save=at) for at in range(0, len(verdicts), 10)]
    chance.shuffle(events)
    account = turn_account_of(events)
    assert account.consistent
    assert {**account.waiting, **account.dropped, "trained": account.trained} == expected


def test_the_rarest_of_many_reasons_count_together() -> None:
    """The least frequent reasons are counted together: here each failed experience has a different error text."""
    names = [f"t{number}" for number in range(200)]
    events: list[Event] = [event for name in names for event in (turn(name), trajectory(f"T-{name}", (name,)))]
    events += [experience(f"E-{name}", name, of=f"T-{name}") for name in names]
    details = ["examples", "examples", *(f"ValueError: row {number}" for number in range(198))]
    verdicts = [
        verdict(f"E-{name}", name, dropped="invalid", detail=detail)
        for name, detail in zip(names, details, strict=True)
    ]
    captured, trained, waiting, dropped = summary(turn_account_of([*events, report(*verdicts)]))
    assert (captured, trained, waiting) == (200, 0, {})
    assert (len(dropped), dropped["examples"], dropped["other"]) == (64, 2, 136)
