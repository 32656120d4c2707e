"""Rows that would teach something wrong are refused, each for its own reason."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_operations.jobs.checks import DuplicateDetector, check
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.held_out import HeldOutTasks
from headrace_operations.jobs.rows import BadRow, DataRow

READER = RowReader({})
CALL = {"role": "assistant", "tool_calls": [{"name": "search", "arguments": {}}]}
USER, ANSWER, RESULT = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "tool", "content": ""},
)
SYSTEM = {"role": "system", "content": "be kind"}


def chat(*messages: dict[str, Any]) -> DataRow:
    return READER.read({"messages": [dict(one) for one in messages]})


def kind_of(row: DataRow) -> str | None:
    try:
        check(row)
    except BadRow as error:
        return error.kind
    return None


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER],
        [SYSTEM, USER, ANSWER],
        [USER, USER, ANSWER],
        [USER, CALL, RESULT, ANSWER],
        [USER, CALL, RESULT, RESULT, CALL, RESULT, ANSWER],
        [USER, CALL],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "so"}],
    ],
)
def test_what_chats_do_is_taken(messages: list[dict[str, Any]]) -> None:
    assert kind_of(chat(*messages)) is None


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([ANSWER], "order"),
        ([SYSTEM, ANSWER], "order"),
        ([USER, ANSWER, ANSWER], "order"),
        ([USER, SYSTEM, ANSWER], "order"),
        ([USER, ANSWER, USER], "order"),
        ([USER, RESULT, ANSWER], "order"),
        ([USER, ANSWER, RESULT, ANSWER], "order"),
        ([USER, CALL, USER, ANSWER], "order"),
        ([{**USER, "content": " \n"}, ANSWER], "empty"),
        ([USER, {**ANSWER, "content": ""}], "empty"),
        ([USER, {**ANSWER, "content": " "}], "empty"),
        ([USER, {**ANSWER, "weight": 0}], "empty"),
    ],
)
def test_what_no_chat_does_is_refused(messages: list[dict[str, Any]], kind: str) -> None:
    assert kind_of(chat(*messages)) == kind


def test_sides_of_a_preference_differ_and_are_one_answer_each() -> None:
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "b"})) is None
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "a"})) == "equal"
    longer = [dict(ANSWER), dict(USER), {**ANSWER, "content": "bye"}]
    assert kind_of(READER.read({"prompt": "p", "chosen": longer, "rejected": "b"})) == "order"


def refused(repeats: DuplicateDetector, record: dict[str, Any], place: str) -> tuple[str, str] | None:
    try:
        repeats.check(READER.read(record), place)
    except BadRow as error:
        return error.kind, str(error)
    return None


def test_repeats_and_contradictions_name_the_other_row() -> None:
    repeats = DuplicateDetector(allowed=False)
    assert refused(repeats, {"prompt": "p", "completion": "c"}, "row 1") is None
    assert refused(repeats, {"prompt": "p", "completion": "d"}, "row 2") is None
    kind, reason = refused(repeats, {"question": "p", "answer": "c"}, "row 3") or ("", "")
    assert kind == "duplicate"
    assert reason.startswith("row 1 is identical")
    assert refused(repeats, {"prompt": "p", "chosen": "a", "rejected": "b"}, "row 4") is None
    assert refused(repeats, {"prompt": "p", "chosen": "b", "rejected": "a"}, "row 5") == (
        "contradiction",
        "row 4 prefers the other answer",
    )
    assert refused(repeats, {"prompt": "q", "completion": "c", "label": True}, "row 6") is None
    assert refused(repeats, {"prompt": "q", "completion": "c", "label": False}, "row 7") == (
        "contradiction",
        "row 6 labels the same answer as good",
    )


def test_duplicates_may_be_meant_and_contradictions_may_not() -> None:
    repeats = DuplicateDetector(allowed=True)
    for place in ("row 1", "row 2"):
        assert refused(repeats, {"prompt": "p", "completion": "c", "label": True}, place) is None
    assert (refused(repeats, {"prompt": "p", "completion": "c", "label": False}, "row 3") or ("",))[
        0
    ] == "contradiction"


LONG = "Anna has 12 apples and gives 5 of them to Ben. How many apples does she have left in the end?"
HELD_OUT = HeldOutTasks({"apples": LONG, "short": "What is 2 + 2?", "word": "Hello!"})


@pytest.mark.parametrize(
    ("asked", "leaks"),
    [
        (LONG, True),
        (LONG.upper().replace(",", " "), True),
        (f"Solve step by step. {LONG} Think first.", True),
        ("Anna has 12 apples and gives 5 of them to Ben. How many apples does Ben have?", True),
        ("Anna has 12 pears. How many does she have?", False),
        ("what is 2+2", True),
        ("Tell me: what is 2 + 2?", True),
        ("What is 3 + 3?", False),
        ("hello", True),
        ("hello there", False),
    ],
)
def test_held_out_tasks_are_found_whole_or_in_long_stretches(asked: str, leaks: bool) -> None:
    row = READER.read({"prompt": asked, "completion": "x"})
    if leaks:
        with pytest.raises(BadRow, match="held-out task") as caught:
            HELD_OUT.check(row)
        assert caught.value.kind == "held_out"
    else:
        HELD_OUT.check(row)


def test_what_the_assistant_says_is_no_leak() -> None:
    HELD_OUT.check(READER.read({"prompt": "x", "completion": LONG}))
