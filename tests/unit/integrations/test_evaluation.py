"""Evaluations: means with intervals, and gate programs."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.evaluation import evaluate, interval, serve_gate
from headrace.practice import Run
from tests.unit.integrations.adapter_rig import VERSION, RecordingGatewayStack


def test_interval_of_shares_is_wilsons() -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    for hits, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        bounds = interval([1.0] * hits + [0.0] * (of - hits))
        assert bounds is not None
        assert bounds == pytest.approx((low, high), abs=5e-5)


def test_interval_of_other_numbers_is_students_t() -> None:
    """By hand: mean 5, standard deviation 1, n = 4: 5 +- 3.1824 / 2."""
    values = [5 + math.sqrt(1.5), 5 - math.sqrt(1.5), 5.0, 5.0]
    bounds = interval(values)
    assert bounds == pytest.approx((5 - 1.5912, 5 + 1.5912), rel=0.01)
    assert interval([3.0]) is None
    assert interval([]) is None


async def play(task: Mapping[str, Any], run: Run) -> str:
    assert run.model == VERSION
    if task["question"] == "broken":
        raise RuntimeError("no tool")
    await run.openai().chat.completions.create()
    return str(task["question"])


def accuracy_of(task: Mapping[str, Any], answer: str) -> float | None:
    if answer == "unknown":
        return None
    if answer == "odd":
        raise ValueError("the judge was not reached")
    return float(answer == task["answer"])


async def test_failures_and_abstentions_are_excluded_from_means() -> None:
    stack = RecordingGatewayStack()
    rows = [("a", "a"), ("b", "c"), ("unknown", ""), ("odd", ""), ("broken", "")]
    tasks = [{"question": question, "answer": answer} for question, answer in rows]
    evaluation = await evaluate(stack, tasks, play, {"accuracy": accuracy_of})
    mean = evaluation.means["accuracy"]
    assert (mean.mean, mean.plays, mean.abstained, mean.failed) == (0.5, 2, 1, 1)
    assert (evaluation.version, evaluation.plays, evaluation.errors) == (VERSION, 5, ("RuntimeError: no tool",))
    assert str(mean).startswith("0.5 (")
    assert stack.gateway.values == []
    assert all(headers["X-Headrace-Purpose"] == "eval" for headers in stack.clients)


async def test_invalid_evaluations_are_refused() -> None:
    stack = RecordingGatewayStack()
    with pytest.raises(UsageError, match="name an exact version"):
        await evaluate(stack, [{}], play, {"accuracy": accuracy_of}, version="tiny")
    with pytest.raises(UsageError, match="tasks, metrics and plays: must not be empty"):
        await evaluate(stack, [], play, {"accuracy": accuracy_of})
    with pytest.raises(UsageError, match="the first error: RuntimeError: no tool"):
        await evaluate(stack, [{"question": "broken", "answer": ""}], play, {"accuracy": accuracy_of})


def gated(play_lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    stack = RecordingGatewayStack()
    monkeypatch.setattr("headrace_integrations.evaluation.gate_program.Stack", lambda *_: stack)
    gate, audit = {"g": {"question": "a", "answer": "a"}}, {"x": {"question": "broken", "answer": ""}}
    gate |= {"odd": {"question": "odd", "answer": ""}}
    out = io.StringIO()
    lines = io.StringIO("".join(json.dumps(line) + "\n" for line in play_lines))
    serve_gate(gate, audit, play, accuracy_of, base_url="http://gateway/v1", lines=lines, out=out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_gate_program_names_its_tasks_and_scores_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [{"version": VERSION, "task": task, "seed": 1} for task in ("g", "x")]
    first, *played = gated(requests, monkeypatch)
    assert first == {"gate": ["g", "odd"], "audit": ["x"]}
    assert {result["task"]: result["score"] for result in played} == {"g": 1.0, "x": 0.0}, (
        "an agent that fails scores 0 here"
    )


def test_a_score_that_fails_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        gated([{"version": VERSION, "task": "odd", "seed": 1}], monkeypatch)
    assert caught.group_contains(HeadraceError, match="the score function failed")


def test_a_score_that_fails_ends_the_program_while_its_input_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry keeps the input open while it waits for answers, so that waiting for its end would be a deadlock."""
    stack = RecordingGatewayStack()
    monkeypatch.setattr("headrace_integrations.evaluation.gate_program.Stack", lambda *_: stack)
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w") as requests:
        print(json.dumps({"version": VERSION, "task": "odd", "seed": 1}), file=requests, flush=True)
        ended: list[BaseException] = []

        def serve() -> None:
            try:
                tasks = {"odd": {"question": "odd", "answer": ""}}
                serve_gate(
                    tasks, {"x": {}}, play, accuracy_of, base_url="http://gateway/v1", lines=lines, out=io.StringIO()
                )
            except ExceptionGroup as group:
                ended.append(group)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join(10)
        groups = [error for error in ended if isinstance(error, ExceptionGroup)]
        assert [group.subgroup(HeadraceError) is not None for group in groups] == [True]
        requests.close()
        thread.join(10)
