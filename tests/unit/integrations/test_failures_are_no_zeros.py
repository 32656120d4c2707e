"""P6 for every adapter: a failed run has no reward, and never a reward of 0. The tests detect an adapter that violates
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.blocking import blocking
from headrace.practice import Run
from headrace.shadow import HeadraceSink, SamplingRateStrategy, TrainingCopy, TrainingRunner
from headrace.trinity import Workflow, run_workflow
from headrace.tuner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tests.unit.integrations.adapter_rig import RecordingGatewayStack, entering, train_once

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
        """Workflow with the judge's reward."""

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
    """Return the violations of an adapter for a run with a failing judge, among runs with the reward 1."""
    stack = RecordingGatewayStack()
    adapter(stack, patch, folder)
    wrong = [f"a reward of {value:g} was sent" for value in stack.gateway.values if value != 1.0]
    wrong += [] if 1.0 in stack.gateway.values else ["the good run's reward was not sent"]
    return wrong + ([] if stack.gateway.ended else ["the failed run's session was not ended"])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_failed_judge_is_no_reward(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert violations(ADAPTERS[name], monkeypatch, tmp_path) == []


def test_planted_adapter_that_sends_0_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planted fault: a tuner that gives every run a number."""
    from headrace_integrations.tuner.functions import outcome

    async def forgiving(*args: Any) -> tuple[float, dict[str, float]]:
        try:
            return await outcome(*args)
        except RuntimeError:
            return 0.0, {}

    monkeypatch.setattr("headrace_integrations.tuner.tuning.outcome", forgiving)
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
