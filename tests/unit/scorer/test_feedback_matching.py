"""Tests of the matching of feedback to trajectories by turn or session, in any order; the latest feedback counts (P10).

Experiences are compared with an oracle that gets the events in order. In the ledger, only the latest value of each
rater for each target counts (pitfall 27).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback, Message
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_scorer.feedback_entries import ANY_CHOICE, EntryKey, FeedbackEntry, entries_of, thumbs_of
from headrace_scorer.feedback_matching import (
    ClosedRuns,
    ClosedTrajectory,
    FeedbackSet,
    PlacedFeedback,
    feedback_for,
    target_trajectories,
    trajectories_losing_feedback,
    with_task,
)
from tests.feedback.playing import TRAINED, differing, replayed, talk
from tests.feedback.program import FAULTS, TRAINING_FAULTS, Fault
from tests.support.turns import START, ask, feedback, user


def closed(name: str, began: int | None, at: float = 0.0, offset: int = 0) -> ClosedTrajectory:
    return ClosedTrajectory(name, epoch_ms(START) + round(at * 1000), offset, began)


def word(
    event: Feedback, offset: int = 0, turns_until: int | None = None, trajectories_until: int | None = None
) -> PlacedFeedback:
    return PlacedFeedback(event, offset, turns_until, trajectories_until)


def target_of(record: PlacedFeedback, peers: Sequence[ClosedTrajectory]) -> frozenset[str]:
    return target_trajectories(record, ClosedRuns(peers))


def feedback_set(*listing: Feedback, general: tuple[Feedback, ...] = ()) -> FeedbackSet:
    """Return the feedback set: general feedback first, then feedback with turn ids, each in the order of the
    arguments."""
    everything = [word(item, index) for index, item in enumerate((*general, *listing))]
    lists = [item for item in everything if item.event.msg_ids]
    return feedback_for(
        "t", ClosedRuns([closed("t", 0)]), lists, [item for item in everything if not item.event.msg_ids]
    )


TWO = [closed("first", 10, at=1), closed("second", 20, at=2)]


def test_feedback_about_a_session_means_what_had_begun_last() -> None:
    for clock in (0.0, 1.5, 9.0):
        event = feedback(at=clock)
        assert target_of(word(event, turns_until=11), TWO) == {"first"}
        assert target_of(word(event, turns_until=20), TWO) == {"first"}, "the second began after it was given"
        assert target_of(word(event, turns_until=21), TWO) == {"second"}


def test_else_it_means_what_began_first() -> None:
    assert target_of(word(feedback(), turns_until=5), TWO) == {"first"}
    assert target_of(word(feedback(), turns_until=5), []) == frozenset()


def test_what_is_closed_together_is_meant_together() -> None:
    peers = [closed("a", 1, at=10), closed("b", 3, at=10), closed("c", 20, at=20)]
    assert target_of(word(feedback(), turns_until=2), peers) == {"a", "b"}


def test_what_was_ingested_began_when_it_was_sent() -> None:
    peers = [closed("first", None, at=1, offset=4), closed("second", None, at=2, offset=9)]
    assert target_of(word(feedback(), turns_until=0, trajectories_until=5), peers) == {"first"}
    assert target_of(word(feedback(), turns_until=0, trajectories_until=10), peers) == {"second"}


def test_what_was_ingested_counts_as_later_than_what_the_gateway_saw_begin() -> None:
    peers = [closed("sampled", 3, at=1), closed("ingested", None, at=2, offset=0)]
    assert target_of(word(feedback(), turns_until=4, trajectories_until=1), peers) == {"ingested"}
    assert target_of(word(feedback(), turns_until=4, trajectories_until=0), peers) == {"sampled"}
    assert target_of(word(feedback(), turns_until=4), peers) == {"sampled"}
    assert target_of(word(feedback(), turns_until=0, trajectories_until=0), peers) == {"sampled"}, "nothing had begun"


def test_what_no_gateway_stamped_has_only_its_time() -> None:
    assert target_of(word(feedback(at=1)), TWO) == {"first"}, "it came as that was closed"
    assert target_of(word(feedback(at=1.5)), TWO) == {"second"}
    assert target_of(word(feedback(at=3)), TWO) == {"second"}
    assert target_of(word(feedback(at=0.5)), TWO) == {"first"}


def test_a_new_trajectory_may_take_over_what_was_said() -> None:
    late = word(feedback(), turns_until=21)
    assert trajectories_losing_feedback("second", ClosedRuns(TWO), [late]) == ["first"]
    assert trajectories_losing_feedback("second", ClosedRuns(TWO), [word(feedback(), turns_until=15)]) == []


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True), st.integers(0, 40))
def test_displacement_is_the_difference_that_a_trajectory_makes(begins: list[int], until: int) -> None:
    peers = [closed(str(n), began, at=n) for n, began in enumerate(begins)]
    record = word(feedback(), turns_until=until)
    before, after = target_of(record, peers[:-1]), target_of(record, peers)
    assert trajectories_losing_feedback(peers[-1].trajectory_id, ClosedRuns(peers), [record]) == sorted(before - after)


def test_facts_and_names_of_feedback_go_before_those_of_the_trajectory() -> None:
    turn = ask([user("q")])
    fact = feedback("s", turn, value=None, context={"expected": "x"}, task_id="task")
    assert feedback_set(fact).context({"expected": "old", "kept": 1}) == {"expected": "x", "kept": 1}
    assert feedback_set(fact).resolve_id("task_id", "old") == "task"


def test_what_is_said_of_a_task_comes_first_and_counts_least() -> None:
    task = feedback("any", value=0.0, level="task", task_id="t", context={"expected": "x", "of": "task"})
    of_session = feedback(value=1.0, context={"expected": "y"})
    combined = with_task(feedback_set(general=(of_session,)), [word(task, 99)])
    assert combined.all == (task, of_session)
    assert (combined.of_task, combined.general, combined.listing) == ((task,), (of_session,), ())
    assert combined.context({}) == {"expected": "y", "of": "task"}


def test_names_come_from_the_list_then_the_trajectory_then_the_session() -> None:
    general = feedback(task_id="session", at=-1)
    assert feedback_set(general=(general,)).resolve_id("task_id", "own") == "own"
    assert feedback_set(general=(general,)).resolve_id("task_id", None) == "session"
    assert feedback_set().resolve_id("task_id", None) is None


def test_a_run_over_several_sessions_has_as_many_parts() -> None:
    first, second = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert feedback_set(feedback("here", first, second)).session_count == 2
    assert feedback_set(feedback("here", first)).session_count == feedback_set().session_count == 1


COUNT = 200


@pytest.mark.parametrize(("seed", "combine"), [(1, "mean"), (2, "sum")])
async def test_any_order_ends_as_the_order_of_the_log(
    database_url: str, data_dir: Path, seed: int, combine: Literal["mean", "sum"]
) -> None:
    assert await differing(database_url, data_dir, seed, COUNT, combine) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.long
async def test_a_planted_fault_is_noticed(data_dir: Path, fault: Fault) -> None:
    with fault.planted():
        assert await differing("sqlite", data_dir, 1, COUNT)


async def test_algorithms_train_the_last_word_however_answers_were_sampled(data_dir: Path) -> None:
    assert await differing("sqlite", data_dir, 4, COUNT, algorithms=TRAINED) == []


@pytest.mark.parametrize("fault", TRAINING_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.long
async def test_a_planted_fault_of_training_is_noticed(data_dir: Path, fault: Fault) -> None:
    with fault.planted():
        assert await differing("sqlite", data_dir, 4, COUNT, algorithms=TRAINED)


async def test_p9_a_replay_ends_the_same() -> None:
    assert await replayed(3, 2_000) == []


def test_the_talk_has_everything() -> None:
    _, sayings = talk(0, 10_000)
    assert {saying.form for saying in sayings} == {
        "number", "thumb", "rating", "label", "parts", "edit", "preference", "facts",
    }  # fmt: skip
    assert {saying.where for saying in sayings} == {
        "session", "all turns", "some turns", "turns", "answer", "task", "pair",
    }  # fmt: skip
    assert 0.08 < sum(saying.withdrawn for saying in sayings) / len(sayings) < 0.12
    assert 0.9 < (max(saying.skew_s for saying in sayings) - min(saying.skew_s for saying in sayings)) / 7200 <= 1


@pytest.mark.own_target
@pytest.mark.timeout(1800)
async def test_ten_thousand_in_any_order(data_dir: Path) -> None:
    assert await differing("sqlite", data_dir, 7, 10_000) == []


FIRST, SECOND, THIRD = (ask([user("q")], "a", "b", at=at) for at in range(3))
ANSWERS = [(FIRST.turn_id, 0), (FIRST.turn_id, 1), (SECOND.turn_id, 0)]
LABELS = {"good": 1.0}
WHOLE = EntryKey.reward("feedback")


def entries(*events: Feedback, most: int = 128) -> dict[EntryKey, FeedbackEntry]:
    return entries_of(FeedbackSet(events), ANSWERS, LABELS, most)


def values(*events: Feedback) -> dict[tuple[str, int, str], float | None]:
    found_entries = entries(*events)
    return {(key.turn_id, key.choice, key.source): entry.value for key, entry in found_entries.items()}


def test_the_last_word_counts_whatever_its_clock_says() -> None:
    first, last = feedback("s", FIRST, SECOND, value=0.0, at=9), feedback("s", FIRST, SECOND, value=1.0, at=2)
    other = feedback("s", FIRST, SECOND, value=0.5, source="review")
    assert entries(first, other, last) == {
        WHOLE: FeedbackEntry("scored", last.event_id, 1.0),
        EntryKey.reward("review"): FeedbackEntry("scored", other.event_id, 0.5),
    }


def test_what_lists_some_turns_is_about_those_and_what_lists_all_is_about_the_run() -> None:
    assert values(feedback("s", FIRST, THIRD, value=0.5)) == {(FIRST.turn_id, ANY_CHOICE, "feedback"): 0.5}
    assert values(feedback("s", FIRST, SECOND, value=0.5)) == {("", ANY_CHOICE, "feedback"): 0.5}


def test_a_level_says_what_is_meant() -> None:
    assert values(feedback("s", FIRST, SECOND, value=1.0, level="turn")) == {
        (FIRST.turn_id, ANY_CHOICE, "feedback"): 1.0,
        (SECOND.turn_id, ANY_CHOICE, "feedback"): 1.0,
    }
    assert values(feedback("s", FIRST, value=1.0, level="session")) == {("", ANY_CHOICE, "feedback"): 1.0}
    assert values(feedback("s", FIRST, value=1.0, level="response", choice=1)) == {(FIRST.turn_id, 1, "feedback"): 1.0}
    assert values(feedback("s", FIRST, value=1.0, level="response")) == {(FIRST.turn_id, 0, "feedback"): 1.0}
    assert values(feedback("s", SECOND, value=1.0, level="response")) == {(SECOND.turn_id, 0, "feedback"): 1.0}
    assert values(feedback("s", SECOND, value=1.0, level="response", choice=1)) == {}, "there was no such answer"


def test_a_rater_says_the_mean_of_turns_unless_there_is_a_word_about_the_run() -> None:
    turns = [feedback("s", turn, value=value, rater="ann") for turn, value in ((FIRST, 1.0), (SECOND, 0.5))]
    bob = feedback(value=0.25, rater="bob")
    nobody = feedback("s", FIRST, value=1.0, source="review")
    by_turn = FeedbackSet((*turns, bob, nobody))
    assert thumbs_of(by_turn, ANSWERS, LABELS, ("feedback",)) == {"ann": 0.75, "bob": 0.25}
    with_run = FeedbackSet((*turns, feedback(value=0.0, rater="ann")))
    assert thumbs_of(with_run, ANSWERS, LABELS, ("feedback",)) == {"ann": 0.0}


def test_a_word_about_a_turn_and_words_about_its_answers_stand_side_by_side() -> None:
    about = [feedback("s", FIRST, value=0.5, level="turn")]
    about += [feedback("s", FIRST, value=float(choice), level="response", choice=choice) for choice in (0, 1)]
    assert sorted(values(*about).values(), key=str) == [0.0, 0.5, 1.0]


def test_a_source_says_the_mean_of_its_raters() -> None:
    ann, bob = feedback(value=1.0, rater="ann"), feedback(value=0.0, rater="bob")
    assert entries(ann, bob)[WHOLE].value == 0.5
    assert entries(bob, ann)[WHOLE] == entries(ann, bob)[WHOLE], "who spoke first makes no difference"
    again = feedback(value=0.5, rater="ann")
    assert entries(ann, bob, again)[WHOLE].value == 0.25, "a rater has one voice"
    withdrawal = feedback(value=None, rater="ann", withdrawn=True)
    assert entries(ann, bob, again, withdrawal)[WHOLE] == FeedbackEntry("scored", bob.event_id, 0.0)
    anonymous = feedback(value=None, withdrawn=True, comment="a mistake")
    assert entries(ann, bob, anonymous)[WHOLE].value == 0.5, "who has no name is a rater of his own"
    last = feedback(value=None, rater="bob", withdrawn=True, comment="sorry")
    assert entries(ann, bob, withdrawal, last)[WHOLE] == FeedbackEntry("withdrawn", last.event_id, reason="sorry")


def test_each_metric_is_a_source() -> None:
    parts = feedback(value=None, parts={"tone": 1.0, "truth": 0.0})
    assert values(parts, feedback(value=0.5, metric="tone"), feedback(value=0.25)) == {
        ("", ANY_CHOICE, "feedback:tone"): 0.5,
        ("", ANY_CHOICE, "feedback:truth"): 0.0,
        ("", ANY_CHOICE, "feedback"): 0.25,
    }
    withdrawal = feedback(value=None, metric="tone", withdrawn=True)
    assert entries(parts, withdrawal)[EntryKey.reward("feedback:tone")].outcome == "withdrawn"


def test_a_label_without_a_value_abstains() -> None:
    good, strange = feedback(value=None, label="good"), feedback(value=None, label="odd")
    assert entries(good)[WHOLE].value == 1.0
    entry = entries(good, strange)[WHOLE]
    assert (entry.outcome, entry.value) == ("abstained", None), "the last word was one that says nothing"
    assert entry.reason == "the label 'odd' has no value in scorer.labels"
    last = feedback(value=None, label="weird", rater="ann")
    assert entries(strange, last)[WHOLE].reason == "the label 'weird' has no value in scorer.labels"
    assert entries(good, feedback(value=None, label="odd", rater="ann"))[WHOLE].value == 1.0


def test_a_rating_lies_on_its_scale() -> None:
    assert values(feedback(value=None, rating=4, scale=(1, 5))) == {("", ANY_CHOICE, "feedback"): 0.75}


def edit(*turns: Any, text: str = "better", **fields: Any) -> Feedback:
    return feedback("s", *turns, value=None, edit=Message(role="assistant", content=text), **fields)


def test_an_edit_is_of_one_answer_and_of_one_rater() -> None:
    first, again = edit(FIRST, text="one"), edit(FIRST, text="two")
    ann, other = edit(FIRST, text="hers", rater="ann"), edit(FIRST, text="b", choice=1)
    by_key = entries(first, ann, other, again)
    contents = {(key.choice, key.subject): json.loads(entry.detail or "")["content"] for key, entry in by_key.items()}
    assert contents == {(0, ""): "two", (0, "ann"): "hers", (1, ""): "b"}
    assert json.loads(entries(first)[EntryKey("edit", FIRST.turn_id, 0, "", "feedback")].detail or "") == {
        "role": "assistant",
        "content": "one",
    }, "without what nobody said"
    withdrawal = feedback("s", FIRST, value=None, withdrawn=True, kind="edit")
    assert [entry.outcome for entry in entries(first, ann, withdrawal).values()] == ["given", "withdrawn"]
    assert entries(edit(THIRD)) == {}, "it was no answer of this trajectory"


def test_edits_and_values_leave_each_other_alone() -> None:
    value = feedback("s", FIRST, value=0.0, level="response")
    assert {key.kind for key in entries(value, edit(FIRST))} == {"reward", "edit"}
    withdrawal = feedback("s", FIRST, value=None, level="response", withdrawn=True)
    found_entries = {key.kind: entry.outcome for key, entry in entries(value, edit(FIRST), withdrawal).items()}
    assert found_entries == {"reward": "withdrawn", "edit": "given"}


def test_of_many_edits_the_newest_count_and_come_back() -> None:
    raters = [edit(FIRST, text=name, rater=name) for name in "abc"]
    edits = list(entries(*raters, most=2).values())
    assert [entry.outcome for entry in edits] == ["withdrawn", "given", "given"]
    assert edits[0].reason == "there are more of them than count, and this one is among the oldest"
    withdrawal = feedback("s", FIRST, value=None, withdrawn=True, kind="edit", rater="c", comment="sorry")
    edits = list(entries(*raters, withdrawal, most=2).values())
    assert [(entry.outcome, entry.reason) for entry in edits] == [
        ("given", None),
        ("given", None),
        ("withdrawn", "sorry"),
    ]


def prefer(better: tuple[str, int], worse: tuple[str, int], **fields: Any) -> Feedback:
    sides = {
        name: ComparedAnswer(turn_id=turn, choice=choice)
        for name, (turn, choice) in (("chosen", better), ("rejected", worse))
    }
    turns = tuple(dict.fromkeys(turn for turn, _ in (better, worse) if turn != THIRD.turn_id))
    return feedback("s", value=None, msg_ids=turns, preference=Preference(**sides), **fields)


def test_a_changed_mind_turns_the_same_preference_round() -> None:
    a, b = (FIRST.turn_id, 0), (FIRST.turn_id, 1)
    first, last = prefer(a, b), prefer(b, a)
    by_key = entries(first, last)
    assert {(key.choice, entry.detail) for key, entry in by_key.items()} == {(1, "chosen"), (0, "rejected")}
    assert entries(first).keys() == by_key.keys()
    assert entries(first, prefer(b, a, rater="ann")).keys() > by_key.keys(), "another rater has a mind of his own"


@pytest.mark.parametrize("turned", [False, True])
def test_a_preference_is_taken_back_by_naming_its_pair(turned: bool) -> None:
    a, b = (FIRST.turn_id, 0), (SECOND.turn_id, 0)
    withdrawal = prefer(b, a, withdrawn=True) if turned else prefer(a, b, withdrawn=True)
    assert {entry.outcome for entry in entries(prefer(a, b), withdrawal).values()} == {"withdrawn"}


def test_of_two_sessions_each_has_its_side() -> None:
    ((key, entry),) = entries(prefer((THIRD.turn_id, 0), (FIRST.turn_id, 0))).items()
    assert (key.turn_id, entry.detail) == (FIRST.turn_id, "rejected")


def test_what_only_brings_facts_is_no_verdict() -> None:
    fact = feedback("s", FIRST, value=None, context={"expected": "x"})
    assert entries(fact) == {}
    assert entries(feedback("s", FIRST, SECOND, value=1.0), fact)[WHOLE].value == 1.0


def test_the_choice_of_an_entry_about_a_whole_turn_is_the_stored_one() -> None:
    assert EntryKey.reward("feedback", "t").choice == -1, "rows of earlier releases hold it"
