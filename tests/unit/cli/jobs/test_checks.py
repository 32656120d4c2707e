"""Checks of rows: each invalid row is refused with its own reason."""

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
    return READER.read({"messages": [dict(message) for message in messages]})


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
def test_valid_conversations_are_accepted(messages: list[dict[str, Any]]) -> None:
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
def test_invalid_conversations_are_refused_with_a_kind(messages: list[dict[str, Any]], kind: str) -> None:
    assert kind_of(chat(*messages)) == kind


def test_answers_of_a_preference_must_differ_and_be_single_messages() -> None:
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "b"})) is None
    assert kind_of(READER.read({"prompt": "p", "chosen": "a", "rejected": "a"})) == "equal"
    longer = [dict(ANSWER), dict(USER), {**ANSWER, "content": "bye"}]
    assert kind_of(READER.read({"prompt": "p", "chosen": longer, "rejected": "b"})) == "order"


def refused(detector: DuplicateDetector, record: dict[str, Any], location: str) -> tuple[str, str] | None:
    try:
        detector.check(READER.read(record), location)
    except BadRow as error:
        return error.kind, str(error)
    return None


def test_duplicates_and_contradictions_name_the_earlier_row() -> None:
    detector = DuplicateDetector(allowed=False)
    assert refused(detector, {"prompt": "p", "completion": "c"}, "row 1") is None
    assert refused(detector, {"prompt": "p", "completion": "d"}, "row 2") is None
    kind, reason = refused(detector, {"question": "p", "answer": "c"}, "row 3") or ("", "")
    assert kind == "duplicate"
    assert reason.startswith("row 1 is identical")
    assert refused(detector, {"prompt": "p", "chosen": "a", "rejected": "b"}, "row 4") is None
    assert refused(detector, {"prompt": "p", "chosen": "b", "rejected": "a"}, "row 5") == (
        "contradiction",
        "row 4 prefers the other answer",
    )
    assert refused(detector, {"prompt": "q", "completion": "c", "label": True}, "row 6") is None
    assert refused(detector, {"prompt": "q", "completion": "c", "label": False}, "row 7") == (
        "contradiction",
        "row 6 labels the same answer as good",
    )


def test_duplicates_can_be_allowed_but_contradictions_cannot() -> None:
    detector = DuplicateDetector(allowed=True)
    for location in ("row 1", "row 2"):
        assert refused(detector, {"prompt": "p", "completion": "c", "label": True}, location) is None
    assert (refused(detector, {"prompt": "p", "completion": "c", "label": False}, "row 3") or ("",))[
        0
    ] == "contradiction"


LONG = "Anna has 12 apples and gives 5 of them to Ben. How many apples does she have left in the end?"
HELD_OUT = HeldOutTasks({"apples": LONG, "short": "What is 2 + 2?", "word": "Hello!"})


@pytest.mark.parametrize(
    ("prompt", "leaks"),
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
def test_held_out_tasks_leak_as_a_whole_or_in_shingles(prompt: str, leaks: bool) -> None:
    row = READER.read({"prompt": prompt, "completion": "x"})
    if leaks:
        with pytest.raises(BadRow, match="held-out task") as caught:
            HELD_OUT.check(row)
        assert caught.value.kind == "held_out"
    else:
        HELD_OUT.check(row)


def test_assistant_messages_do_not_leak_tasks() -> None:
    HELD_OUT.check(READER.read({"prompt": "x", "completion": LONG}))
