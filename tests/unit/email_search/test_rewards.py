"""What a run earns, term by term; how many mails it found; and which two runs of a query are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from email_search import rewards
from email_search.queries import Query
from email_search.rewards import best_and_worst, parts, recall, score_calls

QUERY = Query("0", "sender", "Anna Berg", "Which mails did Anna Berg write?", frozenset({3, 5, 8, 13, 21, 34}))
FOUND = "34 Anna Berg: harbor budget\n21 Anna Berg: Re: maple audit\n13 Anna Berg: Re: 55 maple audit"
RIGHT = {"name": "Anna Berg", "limit": 6}


def run(name: str, arguments: Any, answer: str) -> list[dict[str, Any]]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": text}}
    return [
        {"role": "user", "content": QUERY.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": answer},
    ]


RUNS = {
    "a good call": (run("search_sender", RIGHT, FOUND), (1.0, 0.5, 1.0, 0.0)),
    "the arguments in another order": (run("search_sender", {"limit": 6, "name": "Anna Berg"}, FOUND), (1, 0.5, 1, 0)),
    "too small a limit": (run("search_sender", {**RIGHT, "limit": 2}, FOUND), (1.0, 0.0, 1.0, 0.0)),
    "too large a limit": (run("search_sender", {**RIGHT, "limit": 9}, FOUND), (1.0, 0.0, 1.0, 0.0)),
    "half a name": (run("search_sender", {**RIGHT, "name": "Anna"}, "error: no such name"), (1.0, 0.0, 0.0, 0.0)),
    "another tool": (run("find_contact", RIGHT, "a1 Anna Berg: extension 20"), (0.0, 0.0, 1.0, 0.0)),
    "another tool, in vain": (run("search_folder", {"folder": "x", "limit": 6}, "error: no"), (0.0, 0.0, 0.0, 0.0)),
    "a tool that there is not": (run("search_mail", RIGHT, "error: no tool search_mail"), (0.0, 0.0, 0.0, -2.0)),
    "no JSON": (run("search_sender", '{"name": ', "error: arguments are not JSON"), (1.0, 0.0, 0.0, -2.0)),
    "no call": ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "six"}], (0.0, 0.0, 0.0, 0.0)),
}


def earned(messages: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(parts(score_calls(QUERY, messages)).values())


@pytest.mark.parametrize("name", RUNS)
def test_each_term_of_the_reward(name: str) -> None:
    messages, wanted = RUNS[name]
    assert earned(messages) == wanted


def test_an_invalid_tool_that_is_not_punished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without its term a call of nothing at all is as good as a wrong one that fails."""
    invalid, failed = RUNS["a tool that there is not"][0], RUNS["another tool, in vain"][0]
    assert sum(earned(invalid)) < sum(earned(failed))
    monkeypatch.setattr(rewards, "WORTH", {**rewards.WORTH, "invalid_tool": 0.0})
    assert sum(earned(invalid)) == sum(earned(failed))


def test_recall_counts_relevant_mails_that_a_tool_showed_and_no_numbers_besides() -> None:
    assert recall(QUERY, run("search_sender", RIGHT, FOUND)) == 3, "55 is no mail, and stands in a subject"
    assert recall(QUERY, run("search_sender", RIGHT, f"{FOUND}\n5 Anna Berg: x\n6 Anna Berg: x")) == 4
    assert recall(QUERY, run("find_contact", RIGHT, "a3 Anna Berg: extension 20")) == 0
    assert recall(QUERY, run("search_mail", RIGHT, "error: no tool search_mail")) == 0
    assert recall(QUERY, [{"role": "assistant", "content": "3 5 8 13 21 34"}]) == 0, "saying numbers finds nothing"


def test_the_best_run_is_compared_with_the_worst_and_equal_ones_are_not() -> None:
    assert best_and_worst([(2.0, "b"), (-2.0, "d"), (2.5, "a"), (0.0, "c")]) == ("a", "d")
    assert best_and_worst([(2.5, "first"), (2.5, "second"), (1.0, "third"), (1.0, "fourth")]) == ("first", "third")
    assert best_and_worst([(2.5, "a"), (2.5, "b")]) is None
    assert best_and_worst([(2.5, "alone")]) is None
