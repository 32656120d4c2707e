"""Tests of verdicts and statistics of the judge.

Answers are parsed strictly, and an unreadable answer never becomes a number. Weighted means, medians, order swaps, win
rates and Cohen's kappa with quadratic weights are compared with values computed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_judge import agreement, scoring
from headrace_judge.agreement import confusion, quadratic_kappa
from headrace_judge.rubric import Criterion, Rubric
from headrace_judge.scoring import Judgement
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


WEIGHTED_RUBRIC = Rubric(
    name="r",
    instructions="Judge.",
    criteria=(Criterion(name="a", description="A?", weight=3), Criterion(name="b", description="B?")),
)


def scores(a: int, b: int, reason: str = "") -> Verdict:
    return Verdict(criteria={"a": a, "b": b}, reason=reason)


ABSTAINS = Verdict(criteria=None, reason="cut off")
UNREADABLE = Unreadable("prose")


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [(1, 1, 0.0), (5, 5, 1.0), (3, 3, 0.5), (5, 1, 0.75), (1, 5, 0.25), (4, 2, (3 * 0.75 + 0.25) / 4)],
)
def test_the_value_is_the_weighted_mean_on_0_to_1(a: int, b: int, value: float) -> None:
    judgement = scoring.judge_run(WEIGHTED_RUBRIC, [scores(a, b, "so")])
    assert judgement.value == pytest.approx(value)
    assert judgement.criteria == {"a": (a - 1) / 4, "b": (b - 1) / 4}
    assert judgement.reason == "so"


def test_samples_count_by_their_median_per_criterion() -> None:
    judgement = scoring.judge_run(WEIGHTED_RUBRIC, [scores(5, 1), scores(1, 2), scores(2, 5)])
    assert judgement.criteria == {"a": 0.25, "b": 0.25}
    assert scoring.judge_run(WEIGHTED_RUBRIC, [scores(1, 1), scores(2, 1)]).criteria["a"] == 0.125


def test_a_minority_of_samples_may_be_missing() -> None:
    assert scoring.judge_run(WEIGHTED_RUBRIC, [scores(5, 5), UNREADABLE, scores(5, 5)]).value == 1.0
    assert scoring.judge_run(WEIGHTED_RUBRIC, [scores(5, 5), UNREADABLE]).outcome == "parse_error"
    assert scoring.judge_run(WEIGHTED_RUBRIC, [scores(5, 5), ABSTAINS, ABSTAINS]).outcome == "abstained"
    assert scoring.judge_run(WEIGHTED_RUBRIC, [ABSTAINS]) == Judgement(
        outcome="abstained", reason="the model abstains: cut off"
    )


def test_a_winner_in_both_orders_has_won() -> None:
    judgement = scoring.judge_pair(WEIGHTED_RUBRIC, [scores(1, -1, "better")], [scores(-1, 1, "worse")])
    assert (judgement.value, judgement.criteria) == (1.0, {"a": 1.0, "b": 0.0})
    assert judgement.reason == "better / worse"
    turned = scoring.swap_runs(judgement)
    assert (turned.value, turned.criteria) == (0.0, {"a": 0.0, "b": 1.0})


@pytest.mark.parametrize(("forth", "back"), [(1, 1), (-1, -1), (1, 0), (0, -1)])
def test_a_winner_that_depends_on_the_order_is_a_tie(forth: int, back: int) -> None:
    judgement = scoring.judge_pair(WEIGHTED_RUBRIC, [scores(forth, forth)], [scores(back, back)])
    assert (judgement.outcome, judgement.value, judgement.reason) == ("scored", 0.5, "order")


def test_no_preference_in_both_orders_is_a_tie_of_its_own_kind() -> None:
    assert scoring.judge_pair(WEIGHTED_RUBRIC, [scores(0, 0)], [scores(0, 0)]).reason == "tie"


def test_weights_decide_between_criteria_and_cancel_exactly() -> None:
    assert scoring.judge_pair(WEIGHTED_RUBRIC, [scores(1, -1)], [scores(-1, 1)]).value == 1.0
    thirds = WEIGHTED_RUBRIC.model_copy(
        update={"criteria": tuple(Criterion(name=n, description="?", weight=w) for n, w in [("a", 0.1), ("b", 0.3)])}
    )
    tied = Verdict(criteria={"a": 1, "b": -1}, reason="")
    assert scoring.judge_pair(thirds, [tied], [tied]).reason == "order"


@pytest.mark.parametrize(("bad", "outcome"), [(UNREADABLE, "parse_error"), (ABSTAINS, "abstained")])
def test_a_pair_needs_both_orders(bad: Verdict | Unreadable, outcome: str) -> None:
    assert scoring.judge_pair(WEIGHTED_RUBRIC, [scores(1, 1)], [bad]).outcome == outcome
    assert scoring.judge_pair(WEIGHTED_RUBRIC, [bad], [scores(1, 1)]).outcome == outcome
    assert scoring.swap_runs(scoring.judge_pair(WEIGHTED_RUBRIC, [bad], [bad])).value is None


def decided(value: float, reason: str = "") -> Judgement:
    return Judgement(outcome="scored", value=value, criteria={"a": value, "b": 1 - value}, reason=reason)


FAILED = Judgement(outcome="failed", reason="the endpoint answered 400")
TIMED_OUT = Judgement(outcome="timed_out", reason="no verdict within 60 s")


def test_the_standing_is_the_win_rate_over_decided_pairs() -> None:
    win_rate = scoring.win_rate([("x", decided(1.0)), ("y", decided(0.5, "order")), ("z", FAILED)], waiting=1)
    assert win_rate is not None
    assert (win_rate.value, win_rate.criteria) == (0.75, {"a": 0.75, "b": 0.25})
    assert win_rate.reason.splitlines()[0] == "win rate over 2 pairs"
    assert "tied against y: order" in win_rate.reason
    assert "failed against z: the endpoint answered 400" in win_rate.reason


def test_there_is_no_standing_before_something_is_decided() -> None:
    assert scoring.win_rate([], waiting=0) is None
    assert scoring.win_rate([("z", FAILED)], waiting=1) is None
    none = scoring.win_rate([("x", TIMED_OUT), ("y", FAILED), ("z", FAILED)], waiting=0)
    assert none is not None
    assert (none.outcome, none.value) == ("failed", None)
    assert none.reason == "none of 3 pairs was decided: the endpoint answered 400"


# Ten runs: eight agree; a human 1 was judged 2, and a human 5 was judged 3.
PAIRS = [(1, 1), (1, 1), (1, 2), (2, 2), (3, 3), (3, 3), (4, 4), (5, 5), (5, 5), (5, 3)]


def test_the_table_has_humans_in_rows() -> None:
    assert confusion(PAIRS) == [[2, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 2]]


def test_kappa_by_hand() -> None:
    """Compute Cohen's kappa with quadratic weights by hand.

    Observed disagreement: (1 + 4) / 10 = 0.5. Expected disagreement: the human counts are 3 1 2 1 3 and the judge's are
    2 2 3 1 2; the sum of (i-j)^2 over all 100 combinations is 3*(0+2+12+9+32) + 1*(2+0+3+4+18) + 2*(8+2+0+1+8) +
    1*(18+8+3+0+2) + 3*(32+18+12+1+0) = 165 + 27 + 38 + 31 + 189 = 450, so 4.5. Kappa = 1 - 0.5 / 4.5 = 8/9.
    """
    assert quadratic_kappa(confusion(PAIRS)) == pytest.approx(8 / 9)


@pytest.mark.parametrize(
    ("table", "kappa"),
    [
        ([[5, 0], [0, 5]], 1.0),
        ([[0, 5], [5, 0]], -1.0),
        ([[20, 5], [10, 15]], 0.4),  # the textbook's 2 x 2 example: observed 0.7, by chance 0.5
        ([[4, 4], [4, 4]], 0.0),
        ([[7, 0], [0, 0]], None),
        ([[0, 0], [0, 0]], None),
    ],
)
def test_known_tables(table: list[list[int]], kappa: float | None) -> None:
    assert quadratic_kappa(table) == (None if kappa is None else pytest.approx(kappa))


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_command_prints_kappa_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"human": human, "judge": judge, "run": "ignored"} for human, judge in PAIRS]
    assert agreement.main([str(write(tmp_path / "scores.jsonl", *lines, {"human": 2, "judge": None}, ""))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "all: kappa 0.889, 10 scored, 8 equal, 1 abstained",
        "human \\ judge    1    2    3    4    5",
        "            1    2    1    0    0    0",
        "            2    0    1    0    0    0",
        "            3    0    0    2    0    0",
        "            4    0    0    0    1    0",
        "            5    0    0    1    0    2",
    ]


def test_criteria_are_reported_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "scores.jsonl",
        {"criterion": "a", "human": 1, "judge": 1},
        {"criterion": "b", "human": 1, "judge": 5},
        {"criterion": "a", "human": 5, "judge": 5},
    )
    assert agreement.main([str(path)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if "kappa" in line]
    assert heads == [
        "a: kappa 1.000, 2 scored, 2 equal, 0 abstained",
        "b: kappa 0.000, 1 scored, 0 equal, 0 abstained",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"human": 6, "judge": 1}', ":1: human: Input should be less than or equal to 5"),
        ('{"human": 4.5, "judge": 1}', ":1: human: Input should be a valid integer"),
        ('{"human": 4}', ":1: judge: Field required"),
        ("nonsense", ":1: the line: Invalid JSON"),
        ("", "the file has no scores"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert agreement.main([str(write(tmp_path / "scores.jsonl", line))]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(["/does/not/exist"]) == 2
    assert "/does/not/exist" in capsys.readouterr().err
