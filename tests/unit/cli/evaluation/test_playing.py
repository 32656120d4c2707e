"""Plays of tasks with exactly one version; a failed play is not a wrong answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace_operations.evaluation import asking, gate_program, runner
from headrace_operations.evaluation.runner import EvaluationOptions, evaluate
from headrace_operations.evaluation.tasks import EvaluationTask, read
from headrace_schemas.programs.gate import Played, Tasks

VERSION = "m@0123456789abcdef"
Answer = Callable[[dict[str, Any]], dict[str, Any] | int]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Replace the gateway by a function; the fixture returns the list of its requests."""

    def install(answer: Answer) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = []

        def handle(request: httpx2.Request) -> httpx2.Response:
            body = json.loads(request.content)
            requests.append({**body, "purpose": request.headers.get("X-Headrace-Purpose")})
            response = answer(body)
            if isinstance(response, int):
                return httpx2.Response(response, text="no such version")
            return httpx2.Response(
                200, json={"model": body["model"], "choices": [{"message": response}], **response.pop("top", {})}
            )

        def connection(base_url: str, key: str | None) -> httpx2.Client:
            return httpx2.Client(
                base_url=base_url, transport=httpx2.MockTransport(handle), headers={"X-Headrace-Purpose": "eval"}
            )

        monkeypatch.setattr(runner, "connection", connection)
        monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
        return requests

    return install


def tasks_of(tmp_path: Path, *rows: dict[str, Any]) -> tuple[EvaluationTask, ...]:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(path)


def answer_even_numbers(body: dict[str, Any]) -> dict[str, Any]:
    """Answer questions about even numbers correctly and all others wrongly."""
    number = int(body["messages"][-1]["content"].split()[0])
    return {"role": "assistant", "content": str(2 * number if number % 2 == 0 else 0)}


def test_every_task_is_played_with_the_version_as_evaluation(tmp_path: Path, gateway: Any) -> None:
    requests = gateway(answer_even_numbers)
    tasks = tasks_of(tmp_path, *({"question": f"{n} + {n}", "answer": 2 * n} for n in range(1, 11)))
    options = EvaluationOptions(body={"max_tokens": 8})
    result = evaluate(VERSION, tasks, options)
    assert result.metrics["success"].mean == 0.5
    assert result.metrics["success"].interval == "wilson"
    assert {(request["model"], request["purpose"], request["max_tokens"]) for request in requests} == {
        (VERSION, "eval", 8)
    }
    seeds = {request["messages"][0]["content"]: request["seed"] for request in requests}
    assert len(set(seeds.values())) == 10
    assert evaluate("other@0123456789abcdef", tasks, options).metrics == result.metrics
    assert {request["messages"][0]["content"]: request["seed"] for request in requests[10:]} == seeds, (
        "another version, the same seeds"
    )


def test_tool_calls_are_answered_from_the_task(tmp_path: Path, gateway: Any) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": body["messages"][-1]["content"]}
        call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    gateway(answer)
    tool = {"type": "function", "function": {"name": "search"}}
    row = {"question": "?", "tools": [tool], "tool": "search", "arguments": {"query": "x"}, "relevant": ["m7"]}
    tasks = tasks_of(tmp_path, {**row, "tool_results": {"search": {'{"query": "x"}': "mail m7", "*": "nothing"}}})
    means = {
        name: measurement.mean for name, measurement in evaluate(VERSION, tasks, EvaluationOptions()).metrics.items()
    }
    assert means == {"arguments": 1.0, "format": 1.0, "recall": 1.0, "steps": 2.0, "tool": 1.0}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda body: 404, HeadraceError, r"does not answer \(404: no such version\); serve it with"),
        (lambda body: 503, HeadraceError, r"does not answer \(503"),
        (lambda body: {"content": "x", "top": {"model": "m@ffffffffffff"}}, HeadraceError, "m@ffffffffffff answered"),
    ],
)  # fmt: skip
def test_a_play_that_fails_fails_the_evaluation(
    tmp_path: Path, gateway: Any, answer: Answer, error: type[Exception], message: str
) -> None:
    gateway(answer)
    with pytest.raises(error, match=message):
        evaluate(VERSION, tasks_of(tmp_path, {"question": "?", "answer": "x"}), EvaluationOptions())


def test_an_unreachable_gateway_is_reported_with_its_address(tmp_path: Path) -> None:
    options = EvaluationOptions(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9.*start Headrace with"):
        evaluate(VERSION, tasks_of(tmp_path, {"question": "?", "answer": "x"}), options)


def test_only_an_exact_version_is_evaluated(tmp_path: Path) -> None:
    for name in ("m", "m:champion", "m@xyz"):
        with pytest.raises(UsageError, match="is not an exact version"):
            evaluate(name, tasks_of(tmp_path, {"question": "?", "answer": "x"}), EvaluationOptions())


def test_custom_agents_play_tasks(tmp_path: Path, gateway: Any) -> None:
    gateway(lambda body: {"role": "assistant", "content": "yes"})
    path = tmp_path / "mine.py"
    path.write_text(
        "def play(task, asking):\n"
        "    answer = asking.chat([{'role': 'user', 'content': task.name}])\n"
        "    return {'messages': [answer], 'found': ['m1']}\n"
        "def broken(task, asking):\n    raise RuntimeError('oh')\n"
    )
    tasks = tasks_of(tmp_path, {"question": "?", "answer": "yes", "relevant": ["m1", "m2"]})
    result = evaluate(VERSION, tasks, EvaluationOptions(agent=f"{path}:play"))
    assert (result.metrics["success"].mean, result.metrics["recall"].mean) == (1.0, 0.5)
    with pytest.raises(HeadraceError, match=r"the agent failed on task '\?': RuntimeError: oh"):
        evaluate(VERSION, tasks, EvaluationOptions(agent=f"{path}:broken"))


def test_a_gate_program_answers_each_play(tmp_path: Path, gateway: Any) -> None:
    gateway(answer_even_numbers)
    tasks = tasks_of(tmp_path, *({"question": f"{n} + {n}", "answer": 2 * n} for n in range(1, 21)))
    plays = [{"version": VERSION, "task": f"{n} + {n}", "seed": n} for n in range(1, 21)]
    output = io.StringIO()
    source = io.StringIO("".join(json.dumps(play) + "\n" for play in plays))
    gate_program.serve(tasks, EvaluationOptions(metrics=("success",)), source, output)
    first, *lines = output.getvalue().splitlines()
    task_names = Tasks.model_validate_json(first)
    assert {*task_names.gate, *task_names.audit} == {play["task"] for play in plays}
    played = [Played.model_validate_json(line) for line in lines]
    assert {play.task: play.score for play in played} == {f"{n} + {n}": float(n % 2 == 0) for n in range(1, 21)}
    assert {(play.task, play.seed) for play in played} == {(f"{n} + {n}", n) for n in range(1, 21)}


def test_a_gate_program_fails_without_a_score(tmp_path: Path, gateway: Any) -> None:
    gateway(lambda body: 503)
    tasks = tasks_of(tmp_path, *({"question": f"{n} + {n}", "answer": n} for n in range(20)))
    source = io.StringIO(json.dumps({"version": VERSION, "task": "3 + 3", "seed": 1}) + "\n")
    output = io.StringIO()
    with pytest.raises(HeadraceError, match="does not answer"):
        gate_program.serve(tasks, EvaluationOptions(metrics=("success",)), source, output)
    assert len(output.getvalue().splitlines()) == 1
    with pytest.raises(UsageError, match="a gate has exactly one score, but 0 metrics"):
        gate_program.serve(tasks, EvaluationOptions(), io.StringIO(), io.StringIO())
    with pytest.raises(HeadraceError, match=r"steps = .* must be in 0\.\.1|does not answer"):
        gate_program.serve(
            tasks, EvaluationOptions(metrics=("steps",)),
            io.StringIO(json.dumps({"version": VERSION, "task": "3 + 3", "seed": 1}) + "\n"), io.StringIO(),
        )  # fmt: skip
