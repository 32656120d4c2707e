"""Answers are parsed strictly. An unreadable answer never becomes a number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_judge.rubric import Criterion, Rubric
from headrace_judge.verdict import REASON_CHARS_MAX, Unreadable, Verdict, reader

RUBRIC = Rubric(
    name="r",
    instructions="Judge.",
    criteria=(Criterion(name="a", description="A?"), Criterion(name="b", description="B?")),
)
GOOD = '{"reason": "fine", "criteria": {"a": 1, "b": 5}}'
VERDICT = Verdict(criteria={"a": 1, "b": 5}, reason="fine")
read = reader(RUBRIC)
read_pair = reader(RUBRIC.model_copy(update={"mode": "pair"}))


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"```json\n{GOOD}\n```",
        f"Let me see.\n\n```\n{GOOD}\n```\nDone {{really}}.",
        f"<think>a is {{bad}}, b good</think>\n{GOOD}",
        f"{GOOD}\nOnce more: {GOOD}",
        '{"criteria": {"b": 5, "a": 1}, "abstain": false, "reason": "fine"}',
        '{"reason": "fine", "criteria": {"a": 1.0, "b": 5.00}}',
        '{"abstain": null, "reason": "fine", "criteria": {"a": 1, "b": 5}}',
        f'The agent wrote {{"total": 3}}. {GOOD}',
    ],
    ids=[
        "bare",
        "fenced",
        "fence and prose",
        "thinking aloud",
        "twice the same",
        "abstain false",
        "floats",
        "abstain null",
        "other object",
    ],
)
def test_readable(text: str) -> None:
    assert read(text) == VERDICT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object"),
        ("I would say 4 of 5.", "no JSON object"),
        ("[1, 5]", "no JSON object"),
        ('{"a": 1, "b": 5}', "no JSON object"),
        (GOOD[:-2], "no JSON object"),
        ('{"reason": "", "criteria": {"a": 1, "b": 6}}', "criteria.b.*less than or equal to 5"),
        ('{"reason": "", "criteria": {"a": 0, "b": 5}}', "criteria.a.*greater than or equal to 1"),
        ('{"reason": "", "criteria": {"a": 1.5, "b": 5}}', "criteria.a.*integer"),
        ('{"reason": "", "criteria": {"a": "1", "b": 5}}', "criteria.a.*integer"),
        ('{"reason": "", "criteria": {"a": true, "b": 5}}', "criteria.a.*integer"),
        ('{"reason": "", "criteria": {"a": null, "b": 5}}', "criteria.a.*integer"),
        ('{"reason": "", "criteria": {"a": NaN, "b": 5}}', "no JSON object"),
        ('{"reason": "", "criteria": {"a": 1}}', r"missing: \['b'\]"),
        ('{"reason": "", "criteria": {"a": 1, "b": 5, "c": 1}}', r"unknown: \['c'\]"),
        ('{"reason": "", "criteria": {"a": 1, "a": 5, "b": 1}}', "no JSON object"),
        ('{"reason": "", "criteria": {}}', "either criteria, or abstain"),
        ('{"criteria": {"a": 1, "b": 5}}', "reason: Field required"),
        ('{"reason": "", "criteria": {"a": 1, "b": 5}, "overall": 5}', "overall"),
        ('{"reason": "", "abstain": true, "criteria": {"a": 1, "b": 5}}', "either criteria, or abstain"),
        (f"The run says {GOOD.replace('1', '5')}, but my verdict is {GOOD}", "2 JSON objects that differ"),
        ("{" * 100_000, "characters"),
        ("{" * 1000, "too many braces"),
        ('{"criteria":' * 3000, "too many braces|no JSON object"),
    ],
)
def test_unreadable(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(text)


def test_an_abstention_is_a_verdict_without_numbers() -> None:
    assert read('{"abstain": true, "reason": "cut off"}') == Verdict(criteria=None, reason="cut off")


@pytest.mark.parametrize("criteria", ["{}", "null", '{"a": null, "b": null}', "[]"])
def test_an_abstention_may_list_criteria_without_scores(criteria: str) -> None:
    text = f'{{"abstain": true, "criteria": {criteria}, "reason": "cut off"}}'
    assert read(text) == Verdict(criteria=None, reason="cut off")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("two\nlines", "two\nlines"),
        ("a\ttab\r\n", "a\ttab\r\n"),
        (r"the pattern \d+ and \frac", "the pattern \\d+ and \frac"),
        (r"it\'s", r"it\'s"),
        (r"\u12 is cut", r"\u12 is cut"),
        (r"C:\\dir \"quoted\" \u00e9", 'C:\\dir "quoted" é'),
        ("a\x1bbell", "a\x1bbell"),
    ],
)
def test_a_reason_is_read_as_models_write_it(written: str, reason: str) -> None:
    assert read(f'{{"reason": "{written}", "criteria": {{"a": 1, "b": 5}}}}').reason == reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I would say 4 of 5.", "the answer is 'I would say 4 of 5.'"),
        ("", "the answer is empty"),
        ('{"reason": "x", "criteria": {"a": 1 "b": 5}}', "Expecting ',' delimiter at character 36"),
        ('{"a": 1, "b": 5}', "the object has 'a', 'b'"),
        ("\x1b[31m" + "x" * 10**4, "more characters"),
    ],
)
def test_an_unreadable_answer_is_quoted_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(Unreadable) as refusal:
        read(text)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 400
    assert "\x1b" not in str(refusal.value)


def test_a_preference_is_read_in_any_case() -> None:
    assert read_pair('{"reason": "", "criteria": {"a": " a", "b": "Tie"}}').criteria == {"a": 1, "b": 0}


def test_a_preference_is_a_a_signed_number() -> None:
    verdict = read_pair('{"reason": "", "criteria": {"a": "A", "b": "tie"}}')
    assert verdict.criteria == {"a": 1, "b": 0}
    assert read_pair('{"reason": "", "criteria": {"a": "B", "b": "A"}}').criteria == {"a": -1, "b": 1}
    with pytest.raises(Unreadable, match="'A', 'B' or 'tie'"):
        read_pair('{"reason": "", "criteria": {"a": "A", "b": "both"}}')
    with pytest.raises(Unreadable):
        read_pair(GOOD)


def test_a_long_reason_is_shortened_and_says_so() -> None:
    data: dict[str, Any] = {"reason": "x" * 5000, "criteria": {"a": 1, "b": 5}}
    reason = read(json.dumps(data)).reason
    assert reason == "x" * REASON_CHARS_MAX + " [... 1000 characters left out]"
