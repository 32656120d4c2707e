"""AgentScope's tuner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    PromptTuneConfig,
    TinkerConfig,
    TunerModelConfig,
    WorkflowOutput,
    avg_token_consumption_judge,
    check_judge_function,
    check_workflow_function,
    select_model,
    tune,
    tune_prompt,
)
from headrace_integrations.tuner.configs import outcome
from tests.parity.stage import Stage, program, raises


class Scripted:
    """A chat model that always gives the same answer, at a price."""

    def __init__(self, text: str, tokens: int) -> None:
        self.model_name, self._text, self._tokens = text, text, tokens

    async def __call__(self, messages: Any, **_: Any) -> Any:
        usage = SimpleNamespace(input_tokens=self._tokens, output_tokens=1)
        return SimpleNamespace(
            content=[{"type": "text", "text": self._text}], usage=usage, get_text_content=lambda: self._text
        )


async def workflow(
    task: dict[str, Any], model: Any, auxiliary_models: Mapping[str, Any] | None = None
) -> WorkflowOutput:
    messages = [{"role": "user", "content": task["question"]}]
    response = await model(messages)
    for partner in (auxiliary_models or {}).values():
        await partner(messages, max_tokens=4)
    return WorkflowOutput(response=response, metrics={"length": float(len(response.get_text_content()))})


async def judge(task: dict[str, Any], response: Any, logger: Any = None) -> JudgeOutput:
    if logger is not None:
        logger.debug("judging %s", task["question"])
    return JudgeOutput(reward=1.0 if task["answer"] in response.get_text_content() else 0.0)


def written(folder: Path) -> Path:
    """A data set as in the document."""
    rows = [{"question": "123 + 456", "answer": "579"}, {"question": "1 + 1", "answer": "2"}]
    for split in ("train", "test"):
        (folder / "my_dataset").mkdir(exist_ok=True)
        (folder / "my_dataset" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "my_dataset"


@program("objects", own_stack=True)
def objects(stage: Stage) -> None:
    with stage.working_folder("objects") as folder:
        data = written(folder)
        assert DatasetConfig(path=str(data)).preview(n=1) == [{"question": "123 + 456", "answer": "579"}]
        task = {"question": "123 + 456", "answer": "579"}
        output = blocking(workflow(task, Scripted("it is 579", 3)))
        assert blocking(judge(task, output.response)).reward == 1.0
        check_workflow_function(workflow)
        check_judge_function(judge)
        raises(UsageError, "has a parameter 'more'", lambda: check_workflow_function(takes_more))
        raises(UsageError, "must be async", lambda: check_judge_function(lambda task, response: None))
        reward, metrics = blocking(outcome(workflow, with_metrics, None, task, Scripted("579", 3)))
        assert (reward, metrics) == (0.75, {"length": 3.0, "short": 0.5})
        raises(UsageError, "reward = None", lambda: blocking(outcome(workflow, None, None, task, Scripted("1", 1))))
        base = "models/base"
        train = DatasetConfig(path=str(data))
        tinker = TunerModelConfig(model_path=base, tinker_config=TinkerConfig())
        raises(UsageError, "tinker_config", lambda: tune(workflow_func=workflow, train_dataset=train, model=tinker))
        engines = TunerModelConfig(model_path=base, inference_engine_num=2)
        raises(
            UsageError,
            "inference_engine_num = 2",
            lambda: tune(workflow_func=workflow, train_dataset=train, model=engines),
        )
        nccl = {"model": {"model_path": base}, "synchronizer": {"sync_method": "nccl"}}
        (folder / "trinity.yaml").write_text(yaml.safe_dump(nccl))
        raises(
            UsageError, "sync_method", lambda: tune(workflow_func=workflow, config_path=str(folder / "trinity.yaml"))
        )


@program("tune", own_stack=True)
def tuning(stage: Stage) -> None:
    with stage.working_folder("tune") as folder:
        data = written(folder)
        tune(
            workflow_func=workflow,
            judge_func=judge,
            train_dataset=DatasetConfig(path=str(data), split="train"),
            eval_dataset=DatasetConfig(path=str(data), split="test"),
            model=TunerModelConfig(model_path=str(stage.base), max_model_len=1024, max_tokens=6),
            auxiliary_models={"partner": "tiny", "scripted": Scripted("hm", 1)},
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=2, batch_size=2, learning_rate=1e-3),
        )
        (experiment,) = (folder / "checkpoints" / "AgentScope").iterdir()
        assert experiment.name.startswith("Experiment-2")
        assert list((experiment / "monitor" / "tensorboard").rglob("*tfevents*"))
        last_metrics = json.loads((experiment / "monitor" / "metrics.jsonl").read_text().splitlines()[-1])
        assert last_metrics["step"] == 1
        assert {"rollout/reward", "rollout/length", "eval/reward"} <= set(last_metrics)
        assert (experiment / "global_step_1" / "actor" / "huggingface" / "config.json").is_file()


@program("choosing", own_stack=True)
def choosing(stage: Stage) -> None:
    with stage.working_folder("choosing") as folder:
        data = DatasetConfig(path=str(written(folder)))
        dear, cheap = Scripted("579 or 2", 100), Scripted("579, 2", 3)
        best, means = blocking(
            select_model(
                workflow_func=workflow,
                judge_func=avg_token_consumption_judge,
                train_dataset=data,
                candidate_models=[dear, cheap],
            )
        )
        assert best is cheap
        assert means["best_reward"] == -4.0
        raises(UsageError, "at least 2", lambda: blocking(
            select_model(workflow_func=workflow, judge_func=judge, train_dataset=data, candidate_models=[dear])
        ))  # fmt: skip
        options = PromptTuneConfig(optimization_level="brute")
        raises(UsageError, "one of light", lambda: tune_prompt(
            workflow=prompted, init_system_prompt="Solve.", judge_func=judge, train_dataset=data, config=options
        ))  # fmt: skip


async def prompted(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
    return WorkflowOutput(response=f"{system_prompt} {task['question']}")


async def takes_more(task: Any, model: Any, more: Any) -> None: ...


async def with_metrics(task: dict[str, Any], response: Any) -> JudgeOutput:
    """A judge of two metrics: objects that are awaited, as AgentScope's are."""

    class Metric:
        """One that answers with a result."""

        def __init__(self, name: str, value: float) -> None:
            self.name, self._value = name, value

        async def __call__(self, _response: Any) -> Any:
            return SimpleNamespace(name=self.name, result=self._value)

    results = [await metric(response) for metric in (Metric("right", 1.0), Metric("short", 0.5))]
    return JudgeOutput(
        reward=sum(result.result for result in results) / 2, metrics={results[1].name: results[1].result}
    )
