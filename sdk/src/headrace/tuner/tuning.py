"""`tune`: a workflow, a judge and a data set become steps of training, evaluations and a folder of results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.evaluation.evaluating import evaluate
from headrace.practice.blocking import blocking
from headrace.practice.chat_models import auxiliary, chat_model
from headrace.practice.data_sets import rows_of
from headrace.practice.practising import practise
from headrace.practice.runs import Run
from headrace.practice.steps import Step
from headrace.stack import Stack, stack_for
from headrace.stack.connection import support
from headrace.tuner.configs import AlgorithmConfig, DatasetConfig, TunerModelConfig
from headrace.tuner.functions import check_judge_function, check_workflow_function, outcome

PARSERS = {"deepseek_r1": "think", "qwen3": "think"}
ALGORITHMS = {"reinforceplusplus": "reinforce++"}
"""What is called differently here."""


def tune(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    auxiliary_models: Mapping[str, Any] | None = None,
    algorithm: Any = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | None = None,
) -> None:
    """Train `model` with the workflow's runs; returns when all steps are over.

    `config_path` is a Trinity YAML; what is given beside it wins. `auxiliary_models` are chat models, or names (as
    text or in a `TunerModelConfig`) of models that the gateway serves; they are not trained. Results are in
    `checkpoints/<project>/<experiment>/`. Raises `UsageError` for what cannot be honoured, by name.
    """
    check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    plan = _plan(train_dataset, eval_dataset, model, algorithm, config_path)
    if monitor_type not in (None, "tensorboard"):
        raise UsageError(f"monitor_type = {monitor_type!r}: results are written for tensorboard")
    stamp = datetime.now().strftime("%Y%m%d%H%M%S")  # noqa: DTZ005 (a folder's name, in the user's own time)
    folder = Path("checkpoints") / (project_name or "AgentScope") / (experiment_name or f"Experiment-{stamp}")

    async def play(task: Any, run: Run) -> float:
        others = {name: auxiliary(run, name, one) for name, one in (auxiliary_models or {}).items()}
        reward, metrics = await outcome(workflow_func, judge_func, others, task, chat_model(run, plan.model))
        run.reward(reward, role="agent", metrics=metrics)
        return reward

    with stack_for(plan.model.model_path, plan.settings, private=plan.private) as stack:
        blocking(_train(stack, plan, play, folder))
        _monitor(stack, folder)


@dataclass
class Plan:
    """What is to be done. `private` are settings that only a private stack can be given."""

    model: Any
    algorithm: Any
    rows: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    steps: int
    settings: dict[str, object]
    private: dict[str, object]

    @property
    def tasks_per_step(self) -> int:
        return min(int(self.algorithm.batch_size), len(self.rows))


def _plan(train: Any, held_out: Any, model: Any, algorithm: Any, config_path: str | None) -> Plan:
    converted: dict[str, object] = {}
    if config_path is not None:
        found = _converted(Path(config_path))
        converted = dict(found.settings)
        train = train or _dataset(found.data)
        model = model or TunerModelConfig(model_path=str(converted.get("trainer.base", "")))
        algorithm = algorithm or _algorithm(converted, found.data)
    if train is None or model is None:
        raise UsageError("train_dataset and model are needed, or a config_path that has them")
    _refuse(model)
    algorithm, rows = algorithm or AlgorithmConfig(), rows_of(train)
    per_step = min(int(algorithm.batch_size), len(rows))
    settings: dict[str, object] = {name: one for name, one in converted.items() if name.startswith("trainer.")}
    settings |= {
        "trainer.algorithm": ALGORITHMS.get(algorithm.algorithm_type, algorithm.algorithm_type),
        "trainer.optimizer.learning_rate": float(algorithm.learning_rate),
        "trainer.batch_experiences": per_step * int(algorithm.group_size),
    }
    if algorithm.group_size > 1:
        settings["trainer.group_size"] = int(algorithm.group_size)
    for name in ("trainer.base", "trainer.model", "trainer.lineage"):
        settings.pop(name, None)
    private: dict[str, object] = {
        "inference.tool_parser": model.tool_call_parser,
        "inference.reasoning_parser": PARSERS.get(model.reasoning_parser, model.reasoning_parser),
    }
    if model.max_model_len:
        private["inference.torch.context_tokens_max"] = int(model.max_model_len)
    steps = train.total_steps or -(-len(rows) * int(train.total_epochs) // per_step)
    return Plan(model, algorithm, rows, rows_of(held_out) if held_out else [], int(steps), settings, private)


def _refuse(model: Any) -> None:
    if model.tinker_config is not None:
        raise UsageError("tinker_config: training is done by Headrace's own trainer; leave it out")
    for name in ("tensor_parallel_size", "inference_engine_num"):
        if getattr(model, name) != 1:
            raise UsageError(
                f"{name} = {getattr(model, name)}: engines are replicas that `headrace up` starts; start them, attach "
                "to that Headrace with headrace.stack.attach, and leave this at 1"
            )


def _converted(path: Path) -> Any:
    conversion = support("headrace_cli.trinity_yaml.conversion", "headrace-cli")
    found = conversion.convert(conversion.read(path))
    if found.refused:
        raise UsageError(f"{path}: {'; '.join(found.refused)}")
    return found


def _dataset(data: Mapping[str, Any]) -> DatasetConfig | None:
    if "data.path" not in data:
        return None
    split, epochs = data.get("data.split", "train"), int(data.get("data.epochs", 1))
    return DatasetConfig(path=data["data.path"], split=split, total_epochs=epochs, total_steps=data.get("data.steps"))


def _algorithm(settings: Mapping[str, Any], data: Mapping[str, Any]) -> AlgorithmConfig:
    given = {
        "algorithm_type": settings.get("trainer.algorithm"),
        "learning_rate": settings.get("trainer.optimizer.learning_rate"),
        "group_size": settings.get("trainer.group_size"),
        "batch_size": data.get("data.tasks_per_step"),
    }
    return AlgorithmConfig(**{name: value for name, value in given.items() if value is not None})


async def _train(stack: Stack, plan: Plan, play: Callable[[Any, Run], Any], folder: Path) -> None:
    (folder / "monitor" / "tensorboard").mkdir(parents=True, exist_ok=True)
    sizes = {"group_size": int(plan.algorithm.group_size), "tasks_per_step": plan.tasks_per_step, "steps": plan.steps}
    async for step in practise(stack, plan.rows, play, **sizes):
        numbers = _numbers(step)
        last = step.number == plan.steps
        if plan.held_out and (last or step.number % plan.algorithm.eval_interval_steps == 0):
            found = await evaluate(stack, plan.held_out, play, {"reward": lambda _task, reward: reward})
            numbers |= {"eval/reward": found.means["reward"].mean, "eval/errors": float(len(found.errors))}
        with (folder / "monitor" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step.number, **numbers}) + "\n")
        if step.champion and (last or step.number % plan.algorithm.save_interval_steps == 0):
            _save(stack, step.champion, folder / f"global_step_{step.number}")


def _numbers(step: Step) -> dict[str, float | None]:
    own = {"rollout/reward": step.reward_mean, "rollout/errors": float(len(step.errors))}
    return {**own, **{f"rollout/{name}": one for name, one in step.run_metrics.items()}, **step.metrics}


def _save(stack: Stack, version: str, folder: Path) -> None:
    """Where the files of versions are on this machine they are written; elsewhere the name of the version is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(f"{version}\n", encoding="utf-8")
    if stack.data_dir is not None:
        stack.export(version, folder / "actor" / "huggingface")


def _monitor(stack: Stack, folder: Path) -> None:
    if stack.data_dir is not None:
        written = stack.data_dir / "trainer/tensorboard"
        shutil.copytree(written, folder / "monitor" / "tensorboard", dirs_exist_ok=True)
