"""Tests of evaluation: metrics, confidence intervals and runs of tasks.

Metrics are computed for obvious scores. Intervals are compared with published values and by their coverage. A task is
played with exactly one version, and a failed run is not counted as a wrong answer.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace_operations.evaluation import measures, runner
from headrace_operations.evaluation import tasks as task_files
from headrace_operations.evaluation.measures import TaskMetric, applicable_metrics, compute_metric, load_metrics
from headrace_operations.evaluation.runner import EvaluationOptions, bootstrap, evaluate, measure
from headrace_operations.evaluation.tasks import EvaluationTask, Playthrough, read, splits
from headrace_schemas.programs import PlayResult, Tasks
from headrace_statistics.intervals import wilson

SEARCH = {"type": "function", "function": {"name": "search"}}


def task(**fields: Any) -> EvaluationTask:
    from headrace_operations.jobs.messages import parse_messages, parse_tools

    return EvaluationTask("t", parse_messages("q", "user", "q"), parse_tools(fields.get("tools")), fields, "gate")


def playthrough(text: str = "", *calls: tuple[str, Any], **fields: Any) -> Playthrough:
    tool_calls = [
        {"function": {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}}
        for name, arguments in calls
    ]
    first: list[dict[str, Any]] = (
        [{"role": "assistant", "content": "", "tool_calls": tool_calls}, {"role": "tool", "content": "r"}]
        if tool_calls
        else []
    )
    return Playthrough([*first, {"role": "assistant", "content": text}], fields)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("4", "4", True), ("4", "The answer is 4.", True), ("4", "4 or 5", False), ("4", "It is 14", False),
        ("1,200", "So 1200 in all", True), ("-3", "minus: -3", True), ("3", "-3", False), ("Paris", " paris. ", True),
        ("Paris", "Paris or Rome", False), (["Paris", "Lutetia"], "Lutetia", True), (4, "4.0", True),
        (None, "anything", None),
    ],
)  # fmt: skip
def test_success(answer: Any, text: str, expected: bool | None) -> None:
    assert measures.success(task(answer=answer), playthrough(text)) is expected


def test_steps_are_calls_of_the_model() -> None:
    assert measures.steps(task(), playthrough("x")) == 1
    assert measures.steps(task(), playthrough("x", ("search", {}))) == 2


@pytest.mark.parametrize(
    ("fields", "played", "expected"),
    [
        ({}, playthrough("x"), None),
        ({"format": r"Answer: \d+"}, playthrough("Answer: 12"), True),
        ({"format": r"Answer: \d+"}, playthrough("Well, Answer: 12"), False),
        ({"tools": [SEARCH]}, playthrough("x", ("search", {"a": 1})), True),
        ({"tools": [SEARCH]}, playthrough("x", ("search", "{broken")), False),
        ({"tools": [SEARCH]}, playthrough("x", ("find", {})), False),
        ({"tools": [SEARCH]}, playthrough("x"), True),
        ({"tools": [SEARCH], "format": "y"}, playthrough("x", ("search", {})), False),
    ],
)
def test_format(fields: dict[str, Any], played: Playthrough, expected: bool | None) -> None:
    assert measures.follows_format(task(**fields), played) is expected


@pytest.mark.parametrize(
    ("expected", "called_tools", "share"),
    [
        ("search", ["search"], 1.0),
        ("search", [], 0.0),
        ("search", ["read", "search"], 1.0),
        (["search", "read"], ["search", "read"], 1.0),
        (["search", "read"], ["read", "search"], 0.5),
        (["search", "read", "send"], ["search", "send"], 2 / 3),
        ([], [], 1.0),
        ([], ["search"], 0.0),
    ],
)
def test_tools(expected: Any, called_tools: list[str], share: float) -> None:
    assert measures.tool(
        task(tool=expected), playthrough("x", *((name, {}) for name in called_tools))
    ) == pytest.approx(share)


def test_arguments() -> None:
    single = task(tool="search", arguments={"query": "x"})
    assert measures.arguments(single, playthrough("", ("search", {"query": "x", "limit": 3}))) == 1
    assert measures.arguments(single, playthrough("", ("search", {"query": "y"}))) == 0
    assert measures.arguments(single, playthrough("", ("read", {"query": "x"}))) == 0
    assert measures.arguments(single, playthrough("", ("search", "{broken"))) == 0
    double = task(tool=["search", "search"], arguments=[{"query": "x"}, {"query": "y"}])
    assert measures.arguments(double, playthrough("", ("search", {"query": "y"}), ("search", {"query": "x"}))) == 1
    assert measures.arguments(double, playthrough("", ("search", {"query": "x"}))) == 0.5, (
        "one call is not counted twice"
    )
    assert measures.arguments(task(tool="search"), playthrough("")) is None


def test_recall_counts_whole_names_only() -> None:
    recall_task = task(relevant=["m1", "m2", "m3", "m4"])
    assert measures.recall(recall_task, playthrough("I found m1, m2 and m12.")) == 0.5
    assert measures.recall(recall_task, playthrough("nothing", found=["m3"])) == 0.25
    assert measures.recall(task(), playthrough("m1")) is None


def test_metrics_of_files_and_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(task, played):\n    return len(played.text)\n\ndef broken(task, played):\n    return 'x'\n"
    )
    metrics = load_metrics(["success", f"{path}:length", f"{path}:broken"])
    assert list(metrics) == ["success", "length", "broken"]
    assert compute_metric("length", metrics["length"], task(), playthrough("abc")) == 3.0
    with pytest.raises(HeadraceError, match="returned 'x' on task 't'; it must return a finite number"):
        compute_metric("broken", metrics["broken"], task(), playthrough(""))
    with pytest.raises(HeadraceError, match=r"returned nan on task 't'; it must return a finite number"):
        compute_metric("bad", TaskMetric(lambda task, played: float("nan")), task(), playthrough(""))
    with pytest.raises(HeadraceError) as refusal:
        compute_metric("bad", TaskMetric(lambda task, played: "x" * 10**6), task(), playthrough(""))
    assert len(str(refusal.value)) < 200
    with pytest.raises(HeadraceError, match="metric bad failed on task 't': ZeroDivisionError"):
        compute_metric("bad", TaskMetric(lambda sample, played: 1 / 0), task(), playthrough(""))
    with pytest.raises(UsageError, match=r"'succes'; did you mean 'success'\?.*FILE\.py:NAME"):
        load_metrics(["succes"])
    with pytest.raises(UsageError, match="has no function missing"):
        load_metrics([f"{path}:missing"])


def test_applicable_metrics_depend_on_the_fields_of_the_tasks() -> None:
    assert applicable_metrics([task()]) == ["format", "steps"]
    assert applicable_metrics([task(), task(answer="4", tool="search")]) == ["format", "steps", "success", "tool"]


def test_tasks_are_read_and_split(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows: list[dict[str, Any]] = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    rows.append({"id": "mine", "messages": [{"role": "user", "content": "x"}], "system": "s", "split": "audit"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = read(path)
    assert tasks[3].name == "3 + 3?"
    assert (tasks[-1].name, tasks[-1].split, [task_message.role for task_message in tasks[-1].messages]) == (
        "mine",
        "audit",
        ["system", "user"],
    )
    names = splits(tasks)
    assert not set(names["gate"]) & set(names["audit"])
    assert min(map(len, names.values())) > 10
    assert names == splits(read(path)), "the same in every process"
    for bad, message in (
        ('{"text": 1}', "a task must have one of the columns"),
        ('{"question": "a"}\n{"question": "a"}', "the name 'a' is used twice"),
        ('{"question": "a", "split": "dev"}', "split = 'dev': must be one of"),
        ("", "has no tasks"),
    ):
        path.write_text(bad)
        with pytest.raises(UsageError, match=message):
            read(path)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775328), (5, 10, 0.2365931, 0.7634069), (10, 10, 0.7224672, 1.0), (81, 263, 0.2552704, 0.3661954)],
)
def test_wilson_equals_published_values(successes: int, count: int, low: float, high: float) -> None:
    """The last case is Newcombe's example (1998, table I, 81 of 263)."""
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers_the_share_often_enough() -> None:
    """The mean coverage over several true shares, computed exactly for 40 trials, is at least 94 %."""
    from math import comb

    shares = [number / 50 for number in range(1, 50)]
    covered = []
    for share in shares:
        outcomes = [(n, comb(40, n) * share**n * (1 - share) ** (40 - n)) for n in range(41)]
        covered.append(sum(weight for n, weight in outcomes if wilson(n, 40)[0] <= share <= wilson(n, 40)[1]))
    assert sum(covered) / len(covered) > 0.94


def test_a_bootstrap_resamples_tasks() -> None:
    """The bootstrap resamples tasks: ten equal scores of each of eight tasks give the interval of one score each."""
    draw = random.Random(1)
    tasks = [[draw.random()] * 10 for _ in range(8)]
    single = [[plays[0]] for plays in tasks]
    assert bootstrap(tasks, 0) == pytest.approx(bootstrap(single, 0))
    pooled = bootstrap([[value] for plays in tasks for value in plays], 0)
    low, high = bootstrap(tasks, 0)
    assert high - low > 2 * (pooled[1] - pooled[0]), "resampling plays would make the interval too narrow"


def test_a_bootstrap_is_as_wide_as_the_normal_interval() -> None:
    draw = random.Random(2)
    values = [[draw.gauss(3, 2)] for _ in range(400)]
    low, high = bootstrap(values, 0)
    assert high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)
    assert bootstrap(values, 0) == (low, high), "the same seed draws the same"
    assert bootstrap(values, 1) != (low, high)


def test_shares_of_single_plays_have_wilsons_interval() -> None:
    measurement = measure([[1.0], [0.0], [1.0], [1.0]], 0)
    assert (measurement.mean, measurement.count, measurement.tasks, measurement.interval) == (0.75, 4, 4, "wilson")
    assert (measurement.low, measurement.high) == wilson(3, 4)
    assert measure([[1.0, 0.0], [1.0, 1.0]], 0).interval == "bootstrap", "plays of one task are alike"
    assert measure([[0.5], [1.0]], 0).interval == "bootstrap"
    certain = measure([[2.0], [2.0]], 0)
    assert (certain.low, certain.mean, certain.high) == (2.0, 2.0, 2.0)


VERSION = "m@0123456789abcdef"
Answer = Callable[[dict[str, Any]], dict[str, Any] | int]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Return a function that replaces the gateway by its argument and returns the list of later requests."""

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
        monkeypatch.setattr(task_files, "_PAUSE_S", 0.0)
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
    runner.serve(tasks, EvaluationOptions(metrics=("success",)), source, output)
    first, *lines = output.getvalue().splitlines()
    task_names = Tasks.model_validate_json(first)
    assert {*task_names.gate, *task_names.audit} == {play["task"] for play in plays}
    played = [PlayResult.model_validate_json(line) for line in lines]
    assert {play.task: play.score for play in played} == {f"{n} + {n}": float(n % 2 == 0) for n in range(1, 21)}
    assert {(play.task, play.seed) for play in played} == {(f"{n} + {n}", n) for n in range(1, 21)}


def test_a_gate_program_fails_without_a_score(tmp_path: Path, gateway: Any) -> None:
    gateway(lambda body: 503)
    tasks = tasks_of(tmp_path, *({"question": f"{n} + {n}", "answer": n} for n in range(20)))
    source = io.StringIO(json.dumps({"version": VERSION, "task": "3 + 3", "seed": 1}) + "\n")
    output = io.StringIO()
    with pytest.raises(HeadraceError, match="does not answer"):
        runner.serve(tasks, EvaluationOptions(metrics=("success",)), source, output)
    assert len(output.getvalue().splitlines()) == 1
    with pytest.raises(UsageError, match="a gate has exactly one score, but 0 metrics"):
        runner.serve(tasks, EvaluationOptions(), io.StringIO(), io.StringIO())
    with pytest.raises(HeadraceError, match=r"steps = .* must be in 0\.\.1|does not answer"):
        runner.serve(
            tasks, EvaluationOptions(metrics=("steps",)),
            io.StringIO(json.dumps({"version": VERSION, "task": "3 + 3", "seed": 1}) + "\n"), io.StringIO(),
        )  # fmt: skip
