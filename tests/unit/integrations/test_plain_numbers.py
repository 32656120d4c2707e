"""Rewards, metrics and labels may be numbers of any library, wherever a user's program passes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.blocking import blocking
from headrace.errors import HeadraceError
from headrace.judging import RewardFunction
from headrace.sessions import feedback_body
from headrace.tuner import DatasetConfig, WorkflowOutput, avg_time_judge, avg_token_consumption_judge, select_model
from headrace_integrations.hello_agents.rewards import reward_of_completion
from headrace_integrations.practice.collecting import _rewards_by_name, send_reward
from headrace_integrations.practice.runs import Run, worth_of
from headrace_integrations.stack import offline
from headrace_integrations.trinity.workflows import AgentScopeReActWorkflow, metrics_of, reward_of
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.rows import BadRow
from tests.unit.integrations.adapter_rig import RecordingGatewayStack
from tests.unit.integrations.argument_rig import write_rows

HALVES: list[Any] = [
    0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16), Decimal("0.5"), Fraction(1, 2), torch.tensor(0.5, requires_grad=True),
]  # fmt: skip
BOOLEANS: list[Any] = [True, np.bool_(True), np.array(True), torch.tensor(True)]
ONES: list[Any] = [*BOOLEANS, 1, np.int64(1), torch.tensor(1), Decimal(1)]
ZEROS: list[Any] = [False, np.bool_(False), np.array(False), torch.tensor(False), 0, np.int64(0), Decimal(0)]
WRONG: list[Any] = [
    "0.5", float("nan"), np.float32("inf"), Decimal("NaN"), np.array([0.5, 0.5]), torch.zeros(2), [0.5], {"a": 1},
    np.datetime64("2026-01-01"), object(), 10**400, 1j,
]  # fmt: skip
RECORD = {"messages": [{"role": "assistant", "content": "4"}], "tool_calls": []}


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def run_with(value: Any = None, **more: Any) -> Run:
    run = Run(RecordingGatewayStack(), None, "task", purpose="train", model="tiny")  # type: ignore[arg-type]
    run.reward(value, role="agent", **more)
    return run


def from_react(value: Any) -> float:
    rewards: list[float] = []

    async def reply(_query: str) -> str:
        return "4"

    async def calculate(_response: Any) -> Any:
        return {"part": value}

    fake: Any = SimpleNamespace(
        task=SimpleNamespace(raw_task={"prompt": "?"}, format_args=SimpleNamespace(prompt_key="prompt")),
        agent=SimpleNamespace(reply=reply), calculate_reward=calculate,
        construct_experiences=lambda reward, parts: rewards.append(reward),
    )  # fmt: skip
    blocking(AgentScopeReActWorkflow.run_async(fake))
    return rewards[0]


def from_record(value: Any) -> float:
    stack = RecordingGatewayStack()
    send_reward(stack, {"conversation_id": "s", "total_reward": value})
    ((_, body),) = stack.gateway.posted
    return float(body["value"])


class _Fixed(RewardFunction):
    """Reward function with a fixed reward."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def compute(self, trajectory: Any) -> float:
        return self._value  # type: ignore[no-any-return]


CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "run": lambda value: run_with(value).value, "parts": lambda value: run_with(parts={"a": value}).value,
    "metric": lambda value: run_with(1.0, metrics={"a": value}).metrics["a"],
    "experiences": lambda value: reward_of([SimpleNamespace(reward=value), SimpleNamespace(reward=value)]),
    "metrics of experiences": lambda value: metrics_of([SimpleNamespace(metrics={"a": value})])["a"],
    "react": from_react, "record": from_record, "collected": lambda value: _rewards_by_name(value)["reward"],
    "collected parts": lambda value: _rewards_by_name({"a": value})["a"],
    "function": lambda value: _Fixed(value)(RECORD),
    "rows": lambda value: RowReader({}).read({"prompt": "?", "completion": "4", "reward": value}).reward,
    "hello agents": lambda value: reward_of_completion(lambda _completions, **_: [value], "4", "4"),
    "worth": lambda value: worth_of({"a": 1.0}, {"a": value})["a"],
    "time": lambda value: -blocking(avg_time_judge({}, {"metrics": {"execution_time": value}})).reward,
    "tokens": lambda value: -blocking(avg_token_consumption_judge({}, {"metrics": {"total_tokens": value}})).reward,
    "feedback": lambda value: feedback_body(value, {"session_id": "s"})["value"],
}  # fmt: skip
NUMBERS_ONLY = {"run", "parts", "rows", "worth"}
"""Consumers that refuse booleans; labels and metrics accept them."""
PASSED_ON = {"feedback"}
"""Consumers that pass any value on, which the gateway refuses."""


@pytest.mark.parametrize("value", HALVES, ids=kind_of)
@pytest.mark.parametrize("taker", CONSUMERS)
def test_a_number_of_any_library_is_taken(taker: str, value: Any) -> None:
    number = CONSUMERS[taker](value)
    assert number == 0.5
    assert type(number) is float


@pytest.mark.parametrize("value", BOOLEANS, ids=kind_of)
@pytest.mark.parametrize("taker", CONSUMERS)
def test_a_boolean_of_any_library_is_treated_as_pythons(taker: str, value: Any) -> None:
    if taker in NUMBERS_ONLY:
        with pytest.raises((HeadraceError, ValueError)):
            CONSUMERS[taker](value)
    else:
        assert CONSUMERS[taker](value) == 1.0


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("taker", [name for name in CONSUMERS if name not in {*PASSED_ON}])
def test_what_is_no_number_is_refused(taker: str, value: Any) -> None:
    if taker == "collected" and isinstance(value, dict):
        return  # a mapping is rewards by name
    with pytest.raises((HeadraceError, ValueError)) as refused:
        CONSUMERS[taker](value)
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("value", [*ONES, *ZEROS], ids=kind_of)
def test_labels_and_weights_of_rows_are_taken_from_any_library(value: Any) -> None:
    assert RowReader({}).read({"prompt": "?", "completion": "4", "label": value}).label is bool(value)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4", "weight": value}]
    for column in ("messages", "conversations"):
        assert RowReader({}).read({column: chat}).untrained == (() if value else (1,))
    if not value:
        with pytest.raises(BadRow, match="message 2: only chats may have messages of weight 0"):
            RowReader({}).read({"prompt": chat, "completion": "4"})


@pytest.mark.parametrize("weight", [0.5, 2, "0", -1, [0], float("nan")], ids=repr)
@pytest.mark.parametrize("column", ["messages", "conversations", "prompt", "chosen"])
def test_a_weight_that_nothing_would_honour_is_refused(column: str, weight: Any) -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4", "weight": weight}]
    row: dict[str, Any] = {column: chat}
    row |= {"completion": "4"} if column == "prompt" else {"rejected": chat[:1]} if column == "chosen" else {}
    with pytest.raises(BadRow, match="weight"):
        RowReader({}).read(row)


def test_rows_of_a_job_may_hold_numbers_of_any_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stack = RecordingGatewayStack(settings={"trainer.base": "base"})
    lines: list[str] = []
    monkeypatch.setattr(stack, "data_dir", tmp_path)

    async def decided(*_: Any) -> str:
        return "promoted"

    def run(job: Any) -> str:
        lines.extend(job.source.read_text().splitlines())
        return "tiny@1"

    monkeypatch.setattr(stack, "until_decided", decided)
    monkeypatch.setattr("headrace_operations.jobs.Job", SimpleNamespace)
    monkeypatch.setattr("headrace_operations.jobs.run", run)
    rows: list[dict[str, Any]] = [{"prompt": "?", "completion": "4", "reward": value} for value in HALVES]
    offline.train_rows(stack, "sft", [*rows, {"label": np.bool_(True), "of": {"deep": (np.int64(3),)}}])
    assert [json.loads(line)["reward"] for line in lines[:-1]] == [0.5] * len(HALVES)
    assert json.loads(lines[-1]) == {"label": True, "of": {"deep": [3]}}


@pytest.mark.parametrize("value", [*HALVES, np.bool_(True)], ids=kind_of)
def test_a_judge_that_selects_a_model_may_return_any_number(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, "rows")

    async def model(*_: Any, **__: Any) -> Any:
        return None

    async def play(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="x")

    async def rate(task: Any, response: Any) -> Any:
        return SimpleNamespace(reward=value)

    options: dict[str, Any] = {"workflow_func": play, "judge_func": rate, "candidate_models": [model, model]}
    _, means = blocking(select_model(train_dataset=DatasetConfig(path="rows"), **options))
    assert means["best_reward"] in (0.5, 1.0)
