"""Feedback becomes ledger entries: the latest value of each rater for each target."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_schemas import Feedback, Message
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_scorer.feedback_entries import ANY_CHOICE, EntryKey, FeedbackEntry, entries_of, thumbs_of
from headrace_scorer.feedback_matching import FeedbackSet
from tests.support.turns import ask, feedback, user

ONE, TWO, THREE = (ask([user("q")], "a", "b", at=at) for at in range(3))
ANSWERS = [(ONE.turn_id, 0), (ONE.turn_id, 1), (TWO.turn_id, 0)]
LABELS = {"good": 1.0}
WHOLE = EntryKey.reward("feedback")


def entries(*events: Feedback, most: int = 128) -> dict[EntryKey, FeedbackEntry]:
    return entries_of(FeedbackSet(events), ANSWERS, LABELS, most)


def values(*events: Feedback) -> dict[tuple[str, int, str], float | None]:
    found_entries = entries(*events)
    return {(key.turn_id, key.choice, key.source): entry.value for key, entry in found_entries.items()}


def test_the_last_word_counts_whatever_its_clock_says() -> None:
    first, last = feedback("s", ONE, TWO, value=0.0, at=9), feedback("s", ONE, TWO, value=1.0, at=2)
    other = feedback("s", ONE, TWO, value=0.5, source="review")
    assert entries(first, other, last) == {
        WHOLE: FeedbackEntry("scored", last.event_id, 1.0),
        EntryKey.reward("review"): FeedbackEntry("scored", other.event_id, 0.5),
    }


def test_what_lists_some_turns_is_about_those_and_what_lists_all_is_about_the_run() -> None:
    assert values(feedback("s", ONE, THREE, value=0.5)) == {(ONE.turn_id, ANY_CHOICE, "feedback"): 0.5}
    assert values(feedback("s", ONE, TWO, value=0.5)) == {("", ANY_CHOICE, "feedback"): 0.5}


def test_a_level_says_what_is_meant() -> None:
    assert values(feedback("s", ONE, TWO, value=1.0, level="turn")) == {
        (ONE.turn_id, ANY_CHOICE, "feedback"): 1.0,
        (TWO.turn_id, ANY_CHOICE, "feedback"): 1.0,
    }
    assert values(feedback("s", ONE, value=1.0, level="session")) == {("", ANY_CHOICE, "feedback"): 1.0}
    assert values(feedback("s", ONE, value=1.0, level="response", choice=1)) == {(ONE.turn_id, 1, "feedback"): 1.0}
    assert values(feedback("s", ONE, value=1.0, level="response")) == {(ONE.turn_id, 0, "feedback"): 1.0}
    assert values(feedback("s", TWO, value=1.0, level="response")) == {(TWO.turn_id, 0, "feedback"): 1.0}
    assert values(feedback("s", TWO, value=1.0, level="response", choice=1)) == {}, "there was no such answer"


def test_a_rater_says_the_mean_of_turns_unless_there_is_a_word_about_the_run() -> None:
    turns = [feedback("s", turn, value=value, rater="ann") for turn, value in ((ONE, 1.0), (TWO, 0.5))]
    bob = feedback(value=0.25, rater="bob")
    nobody = feedback("s", ONE, value=1.0, source="review")
    by_turn = FeedbackSet((*turns, bob, nobody))
    assert thumbs_of(by_turn, ANSWERS, LABELS, ("feedback",)) == {"ann": 0.75, "bob": 0.25}
    with_run = FeedbackSet((*turns, feedback(value=0.0, rater="ann")))
    assert thumbs_of(with_run, ANSWERS, LABELS, ("feedback",)) == {"ann": 0.0}


def test_a_word_about_a_turn_and_words_about_its_answers_stand_side_by_side() -> None:
    about = [feedback("s", ONE, value=0.5, level="turn")]
    about += [feedback("s", ONE, value=float(choice), level="response", choice=choice) for choice in (0, 1)]
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
    first, again = edit(ONE, text="one"), edit(ONE, text="two")
    ann, other = edit(ONE, text="hers", rater="ann"), edit(ONE, text="b", choice=1)
    by_key = entries(first, ann, other, again)
    contents = {(key.choice, key.subject): json.loads(entry.detail or "")["content"] for key, entry in by_key.items()}
    assert contents == {(0, ""): "two", (0, "ann"): "hers", (1, ""): "b"}
    assert json.loads(entries(first)[EntryKey("edit", ONE.turn_id, 0, "", "feedback")].detail or "") == {
        "role": "assistant",
        "content": "one",
    }, "without what nobody said"
    withdrawal = feedback("s", ONE, value=None, withdrawn=True, kind="edit")
    assert [entry.outcome for key, entry in entries(first, ann, withdrawal).items()] == ["given", "withdrawn"]
    assert entries(edit(THREE)) == {}, "it was no answer of this trajectory"


def test_edits_and_values_leave_each_other_alone() -> None:
    value = feedback("s", ONE, value=0.0, level="response")
    assert {key.kind for key in entries(value, edit(ONE))} == {"reward", "edit"}
    withdrawal = feedback("s", ONE, value=None, level="response", withdrawn=True)
    found_entries = {key.kind: entry.outcome for key, entry in entries(value, edit(ONE), withdrawal).items()}
    assert found_entries == {"reward": "withdrawn", "edit": "given"}


def test_of_many_edits_the_newest_count_and_come_back() -> None:
    raters = [edit(ONE, text=name, rater=name) for name in "abc"]
    edits = list(entries(*raters, most=2).values())
    assert [entry.outcome for entry in edits] == ["withdrawn", "given", "given"]
    assert edits[0].reason == "there are more of them than count, and this one is among the oldest"
    withdrawal = feedback("s", ONE, value=None, withdrawn=True, kind="edit", rater="c", comment="sorry")
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
    turns = tuple(dict.fromkeys(turn for turn, _ in (better, worse) if turn != THREE.turn_id))
    return feedback("s", value=None, msg_ids=turns, preference=Preference(**sides), **fields)


def test_a_changed_mind_turns_the_same_preference_round() -> None:
    a, b = (ONE.turn_id, 0), (ONE.turn_id, 1)
    first, last = prefer(a, b), prefer(b, a)
    by_key = entries(first, last)
    assert {(key.choice, entry.detail) for key, entry in by_key.items()} == {(1, "chosen"), (0, "rejected")}
    assert entries(first).keys() == by_key.keys()
    assert entries(first, prefer(b, a, rater="ann")).keys() > by_key.keys(), "another rater has a mind of his own"


@pytest.mark.parametrize("turned", [False, True])
def test_a_preference_is_taken_back_by_naming_its_pair(turned: bool) -> None:
    a, b = (ONE.turn_id, 0), (TWO.turn_id, 0)
    withdrawal = prefer(b, a, withdrawn=True) if turned else prefer(a, b, withdrawn=True)
    assert {entry.outcome for entry in entries(prefer(a, b), withdrawal).values()} == {"withdrawn"}


def test_of_two_sessions_each_has_its_side() -> None:
    ((key, entry),) = entries(prefer((THREE.turn_id, 0), (ONE.turn_id, 0))).items()
    assert (key.turn_id, entry.detail) == (ONE.turn_id, "rejected")


def test_what_only_brings_facts_is_no_verdict() -> None:
    fact = feedback("s", ONE, value=None, context={"expected": "x"})
    assert entries(fact) == {}
    assert entries(feedback("s", ONE, TWO, value=1.0), fact)[WHOLE].value == 1.0


def test_the_choice_of_an_entry_about_a_whole_turn_is_the_stored_one() -> None:
    assert EntryKey.reward("feedback", "t").choice == -1, "rows of earlier releases hold it"
