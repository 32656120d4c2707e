"""Tests that no adapter gives a failed run the reward 0 (P6): the run has no reward.

Rewards, metrics and labels may be numbers of any library, wherever a user's program passes them.
"""

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
from headrace.practice import Run
from headrace.sessions import feedback_body
from headrace.shadow import HeadraceSink, SamplingRateStrategy, TrainingCopy, TrainingRunner
from headrace.trinity import Workflow, run_workflow
from headrace.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    TunerModelConfig,
    WorkflowOutput,
    avg_time_judge,
    avg_token_consumption_judge,
    select_model,
    tune,
)
from headrace_integrations.hello_agents.rewards import reward_of_completion
from headrace_integrations.practice.collecting import _rewards_by_name, send_reward
from headrace_integrations.practice.runs import part_values
from headrace_integrations.stack import attaching
from headrace_integrations.trinity.workflows import AgentScopeReActWorkflow, metrics_of, reward_of
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.sources import BadRow
from tests.unit.integrations.conftest import RecordingGatewayStack, entering, train_once, write_rows

ROWS = [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "fail"}]
"""Rows of which the judge of the second one fails."""
Adapter = Callable[[RecordingGatewayStack, pytest.MonkeyPatch, Path], None]


def judged(truth: str) -> float:
    if truth == "fail":
        raise RuntimeError("the judge was not reached")
    return 1.0


def with_the_tuner(stack: RecordingGatewayStack, patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=await model([{"role": "user", "content": task["question"]}]))

    async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(reward=judged(task["answer"]))

    patch.setattr("headrace_integrations.tuner.tuning.train_on_tasks", train_once)
    patch.setattr("headrace_integrations.tuner.tuning.stack_for", entering(stack))
    rows = folder / "train.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    patch.chdir(folder)
    tune(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(rows)),
        model=TunerModelConfig(model_path="base"),
        algorithm=AlgorithmConfig(group_size=1, batch_size=2),
    )


def with_trinity(stack: RecordingGatewayStack, patch: pytest.MonkeyPatch, _folder: Path) -> None:
    class Judged(Workflow):
        """Workflow that uses the judge's reward."""

        async def run_async(self) -> list[Any]:
            from types import SimpleNamespace

            client = self.model.get_openai_async_client()
            await client.chat.completions.create(model=client.model_path, messages=[])
            return [SimpleNamespace(reward=judged(self.task.raw_task["answer"]), metrics={})]

    patch.setattr("headrace_integrations.trinity.workflows.train_on_tasks", train_once)

    async def all_steps() -> None:
        async for _ in run_workflow(stack, Judged, ROWS, repeat_times=1, batch_size=2):
            pass

    blocking(all_steps())


def with_the_training_tool(stack: RecordingGatewayStack, patch: pytest.MonkeyPatch, folder: Path) -> None:
    from headrace.hello_agents import RLTrainingTool

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [judged(truth) for truth in columns["ground_truth"]]

    patch.setattr("headrace_integrations.hello_agents.tool.train_on_tasks", train_once)
    patch.setattr("headrace_integrations.hello_agents.tool.stack_for", entering(stack))
    patch.setattr("headrace_integrations.hello_agents.tool.write", lambda *_: None)
    tool = RLTrainingTool()
    tool.register_dataset("sums", ROWS)
    tool.register_reward_function("sums", reward)
    parameters = {"action": "train", "algorithm": "grpo", "model_name": "base", "dataset": "sums", "num_epochs": 1}
    result = json.loads(tool.run({**parameters, "output_dir": str(folder / "out"), "batch_size": 1}))
    assert result["status"] == "success", result


def with_practice_alone(stack: RecordingGatewayStack, _patch: pytest.MonkeyPatch, _folder: Path) -> None:
    async def play(task: dict[str, Any], run: Run) -> None:
        await run.openai().chat.completions.create()
        run.reward(judged(task["answer"]))

    async def all_steps() -> None:
        async for _ in train_once(stack, ROWS, play):
            pass

    blocking(all_steps())


def with_training_copies(stack: RecordingGatewayStack, _patch: pytest.MonkeyPatch, _folder: Path) -> None:
    def make_agent(copy: TrainingCopy) -> Callable[[dict[str, Any]], str]:
        copy.openai(blocking=True)
        return lambda row: str(row["answer"])

    everything = SamplingRateStrategy(1.0)
    runner = TrainingRunner(
        HeadraceSink(stack), make_agent, lambda copy: judged(copy.inputs["answer"]), selection=everything
    )
    with runner:
        for row in ROWS:
            runner.offer(row, "served")


ADAPTERS: dict[str, Adapter] = {
    "tuner": with_the_tuner,
    "trinity": with_trinity,
    "training tool": with_the_training_tool,
    "practice": with_practice_alone,
    "training copies": with_training_copies,
}


def violations(adapter: Adapter, patch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Return the violations of `adapter` for a run with a failing judge among runs with the reward 1."""
    stack = RecordingGatewayStack()
    adapter(stack, patch, folder)
    wrong = [f"a reward of {value:g} was sent" for value in stack.gateway.values if value != 1.0]
    wrong += [] if 1.0 in stack.gateway.values else ["the good run's reward was not sent"]
    return wrong + ([] if stack.gateway.ended else ["the failed run's session was not ended"])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_failed_judge_is_no_reward(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert violations(ADAPTERS[name], monkeypatch, tmp_path) == []


def test_planted_adapter_that_sends_0_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Injected fault: a tuner that gives every run a number."""
    from headrace_integrations.tuner.configs import run_and_judge

    async def forgiving(*args: Any) -> tuple[float, dict[str, float]]:
        try:
            return await run_and_judge(*args)
        except RuntimeError:
            return 0.0, {}

    monkeypatch.setattr("headrace_integrations.tuner.tuning.run_and_judge", forgiving)
    assert "a reward of 0 was sent" in violations(with_the_tuner, monkeypatch, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None, True])
def test_reward_that_is_not_a_number_fails_the_run(value: Any) -> None:
    stack = RecordingGatewayStack()

    async def play(_task: Any, run: Run) -> None:
        run.session()
        run.reward(value)

    async def failed_run() -> Run:
        run = Run(stack, stack.async_client(), {"question": "?"}, purpose="train", model="tiny")
        await run.execute(play)
        return run

    run = blocking(failed_run())
    assert run.error is not None
    assert run.error.startswith("ValueError")
    assert stack.gateway.values == []


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
    "worth": lambda value: part_values({"a": 1.0}, {"a": value})["a"],
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
    attaching.train_rows(stack, "sft", [*rows, {"label": np.bool_(True), "of": {"deep": (np.int64(3),)}}])
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
