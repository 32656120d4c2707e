from __future__ import annotations

import itertools

import pytest

from math_agent.calculator import LENGTH_MAX, Calculator, calculate
from math_agent.problems import SPLITS, Change, Problem, Split, stream

PROBLEM_COUNT = 300


def first(split: Split, seed: int = 0, count: int = PROBLEM_COUNT) -> list[Problem]:
    return list(itertools.islice(stream(split, seed), count))


def test_the_answer_is_that_of_somebody_who_reads_the_question() -> None:
    """The oracle reads only the sentences: each verb stands for a sign, and changes apply in the order of the text."""
    for problem in first("train"):
        opening, *sentences, _ = problem.question.split(". ")
        amount = int(opening.split()[2])
        for sentence in sentences:
            verb, number = sentence.split()[-2:]
            by = int(number)
            amount = {"becomes": amount * by}.get(
                verb, amount + by if verb in ("buys", "finds", "picks") else amount - by
            )
            assert amount > 0
        assert amount == problem.expected
        assert problem.steps_min == 2 * len(sentences)


def test_one_by_hand() -> None:
    changes = (Change("First", "+", 13, "First Mia buys 13."), Change("Last", "*", 2, "Last each becomes 2."))
    problem = Problem("0", "2 changes", "Mia", "nuts", 24, changes)
    assert problem.question == "Mia has 24 nuts. First Mia buys 13. Last each becomes 2. How many nuts are there now?"
    assert (problem.expected, problem.steps_min) == (74, 4)


def test_no_two_splits_share_a_question_and_none_comes_twice() -> None:
    questions = [problem.question for split in SPLITS for seed in (0, 1) for problem in first(split, seed, 100)]
    by_split = {split: {problem.question for seed in (0, 1) for problem in first(split, seed, 100)} for split in SPLITS}
    assert len(set(questions)) == sum(map(len, by_split.values())) > 790
    assert all(len({problem.id for problem in first(split)}) == PROBLEM_COUNT for split in SPLITS)


def test_the_seed_decides_alone_and_both_lengths_come_in_turn() -> None:
    assert first("audit") == first("audit") != first("audit", 1)
    assert [problem.kind for problem in first("gate", count=4)] == ["2 changes", "3 changes"] * 2


@pytest.mark.parametrize(
    ("expression", "value"), [("24 + 13", 37), ("24-13", 11), (" 6 * 7 ", 42), ("-(2 + 3) * 4", -20)]
)
def test_the_calculator_calculates(expression: str, value: int) -> None:
    assert calculate(expression) == value
    assert Calculator().call("calculator", f'{{"expression": "{expression}"}}') == str(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"expression": "2 ** 9999"}', "only whole numbers"),
        ('{"expression": "__import__(1)"}', "only whole numbers"),
        ('{"expression": "1.5 + 2"}', "only whole numbers"),
        ('{"expression": "True + 1"}', "only whole numbers"),
        ('{"expression": "2 +"}', "not an expression"),
        ('{"expression": ""}', "not an expression"),
        ('{"expression": "1\\u0000"}', "not an expression"),
        (f'{{"expression": "{"9" * (LENGTH_MAX + 1)}"}}', "more than 64 characters"),
        ('{"text": "1 + 1"}', "expected the argument expression"),
        ('{"expression": "1', "arguments are not JSON"),
    ],
)
def test_a_wrong_call_is_an_answer_for_the_model(arguments: str, message: str) -> None:
    assert Calculator().call("calculator", arguments).startswith(f"error: {message}")
    assert Calculator().call("abacus", '{"expression": "1 + 1"}') == "error: no tool abacus"
