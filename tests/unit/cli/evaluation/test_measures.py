"""The metrics that come with Headrace, on plays whose value is plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation import measures
from headrace_operations.evaluation.asking import Playthrough
from headrace_operations.evaluation.task_metrics import TaskMetric, chosen, fitting, value_of
from headrace_operations.evaluation.tasks import EvaluationTask, read, splits

SEARCH = {"type": "function", "function": {"name": "search"}}


def task(**fields: Any) -> EvaluationTask:
    from headrace_operations.jobs.messages import said, tools

    return EvaluationTask("t", said("q", "user", "q"), tools(fields.get("tools")), fields, "gate")


def said(text: str = "", *calls: tuple[str, Any], **fields: Any) -> Playthrough:
    made = [
        {"function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
        for name, given in calls
    ]
    first: list[dict[str, Any]] = (
        [{"role": "assistant", "content": "", "tool_calls": made}, {"role": "tool", "content": "r"}] if made else []
    )
    return Playthrough([*first, {"role": "assistant", "content": text}], fields)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("4", "4", True),
        ("4", "The answer is 4.", True),
        ("4", "4 or 5", False),
        ("4", "It is 14", False),
        ("1,200", "So 1200 in all", True),
        ("-3", "minus: -3", True),
        ("3", "-3", False),
        ("Paris", " paris. ", True),
        ("Paris", "Paris or Rome", False),
        (["Paris", "Lutetia"], "Lutetia", True),
        (4, "4.0", True),
        (None, "anything", None),
    ],
)
def test_success(answer: Any, text: str, right: bool | None) -> None:
    assert measures.success(task(answer=answer), said(text)) is right


def test_steps_are_calls_of_the_model() -> None:
    assert measures.steps(task(), said("x")) == 1
    assert measures.steps(task(), said("x", ("search", {}))) == 2


@pytest.mark.parametrize(
    ("fields", "played", "kept"),
    [
        ({}, said("x"), None),
        ({"format": r"Answer: \d+"}, said("Answer: 12"), True),
        ({"format": r"Answer: \d+"}, said("Well, Answer: 12"), False),
        ({"tools": [SEARCH]}, said("x", ("search", {"a": 1})), True),
        ({"tools": [SEARCH]}, said("x", ("search", "{broken")), False),
        ({"tools": [SEARCH]}, said("x", ("find", {})), False),
        ({"tools": [SEARCH]}, said("x"), True),
        ({"tools": [SEARCH], "format": "y"}, said("x", ("search", {})), False),
    ],
)
def test_format(fields: dict[str, Any], played: Playthrough, kept: bool | None) -> None:
    assert measures.format_kept(task(**fields), played) is kept


@pytest.mark.parametrize(
    ("wanted", "called", "share"),
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
def test_tools(wanted: Any, called: list[str], share: float) -> None:
    assert measures.tool(task(tool=wanted), said("x", *((name, {}) for name in called))) == pytest.approx(share)


def test_arguments() -> None:
    one = task(tool="search", arguments={"query": "x"})
    assert measures.arguments(one, said("", ("search", {"query": "x", "limit": 3}))) == 1
    assert measures.arguments(one, said("", ("search", {"query": "y"}))) == 0
    assert measures.arguments(one, said("", ("read", {"query": "x"}))) == 0
    assert measures.arguments(one, said("", ("search", "{broken"))) == 0
    two = task(tool=["search", "search"], arguments=[{"query": "x"}, {"query": "y"}])
    assert measures.arguments(two, said("", ("search", {"query": "y"}), ("search", {"query": "x"}))) == 1
    assert measures.arguments(two, said("", ("search", {"query": "x"}))) == 0.5, "one call is not counted twice"
    assert measures.arguments(task(tool="search"), said("")) is None


def test_recall_counts_what_was_found_and_no_part_of_a_name() -> None:
    one = task(relevant=["m1", "m2", "m3", "m4"])
    assert measures.recall(one, said("I found m1, m2 and m12.")) == 0.5
    assert measures.recall(one, said("nothing", found=["m3"])) == 0.25
    assert measures.recall(task(), said("m1")) is None


def test_metrics_of_files_and_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(task, played):\n    return len(played.text)\n\ndef broken(task, played):\n    return 'x'\n"
    )
    found = chosen(["success", f"{path}:length", f"{path}:broken"])
    assert list(found) == ["success", "length", "broken"]
    assert value_of("length", found["length"], task(), said("abc")) == 3.0
    with pytest.raises(HeadraceError, match="returned 'x' on task 't'; a finite number is wanted"):
        value_of("broken", found["broken"], task(), said(""))
    with pytest.raises(HeadraceError, match=r"returned nan on task 't'; a finite number is wanted"):
        value_of("bad", TaskMetric(lambda task, played: float("nan")), task(), said(""))
    with pytest.raises(HeadraceError) as refusal:
        value_of("bad", TaskMetric(lambda task, played: "x" * 10**6), task(), said(""))
    assert len(str(refusal.value)) < 200
    with pytest.raises(HeadraceError, match="the metric bad failed on task 't': ZeroDivisionError"):
        value_of("bad", TaskMetric(lambda one, played: 1 / 0), task(), said(""))
    with pytest.raises(UsageError, match=r"'succes'; did you mean 'success'\?.*FILE\.py:NAME"):
        chosen(["succes"])
    with pytest.raises(UsageError, match="has no function missing"):
        chosen([f"{path}:missing"])


def test_what_the_tasks_say_decides_which_metrics_fit() -> None:
    assert fitting([task()]) == ["format", "steps"]
    assert fitting([task(), task(answer="4", tool="search")]) == ["format", "steps", "success", "tool"]


def test_tasks_are_read_and_split(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows: list[dict[str, Any]] = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    rows.append({"id": "mine", "messages": [{"role": "user", "content": "x"}], "system": "s", "split": "audit"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = read(path)
    assert tasks[3].name == "3 + 3?"
    assert (tasks[-1].name, tasks[-1].split, [one.role for one in tasks[-1].messages]) == (
        "mine",
        "audit",
        ["system", "user"],
    )
    names = splits(tasks)
    assert not set(names["gate"]) & set(names["audit"])
    assert min(map(len, names.values())) > 10
    assert names == splits(read(path)), "the same in every process"
    for bad, message in (
        ('{"text": 1}', "a task has one of the columns"),
        ('{"question": "a"}\n{"question": "a"}', "another task is called 'a'"),
        ('{"question": "a", "split": "dev"}', "split is 'dev'"),
        ("", "holds no tasks"),
    ):
        path.write_text(bad)
        with pytest.raises(UsageError, match=message):
            read(path)
