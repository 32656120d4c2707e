"""`tune`: training with a workflow, a judge and a data set, followed by an evaluation and a folder of results."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace_integrations.evaluation import evaluate
from headrace_integrations.practice.chat_models import auxiliary_model, chat_model, check_engines, sampling_options
from headrace_integrations.practice.data_sets import check_schedule, rows_of
from headrace_integrations.practice.runs import Run
from headrace_integrations.practice.training import Step, train_on_tasks
from headrace_integrations.stack import Stack, stack_for
from headrace_integrations.tuner.configs import (
    AlgorithmConfig,
    DatasetConfig,
    TunerModelConfig,
    check_judge_function,
    check_workflow_function,
    run_and_judge,
)
from headrace_operations.arguments import check_unchanged, real_number, whole_number

PARSERS = {"deepseek_r1": "think", "qwen3": "think"}
ALGORITHMS = {"reinforceplusplus": "reinforce++"}
"""Algorithms of AgentScope whose names differ in Headrace."""
_LABELS = {
    "data.tasks": "the data set has no other name",
    "data.prompt_key": "a workflow gets whole rows",
    "data.response_key": "a judge gets whole rows",
}
log = logging.getLogger("headrace.tuner")


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
    """Train `model` on runs of a workflow, and return after the last training step.

    Results are written to `checkpoints/<project>/<experiment>/`.

    Args:
        auxiliary_models: chat models, or names (as text or in a `TunerModelConfig`) of models at the gateway. They are
            not trained.
        config_path: a Trinity YAML file. Arguments override it, and a warning lists its keys that have no effect.

    Raises:
        UsageError: an option cannot be honoured; the message names it.
    """
    check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    plan = _plan(train_dataset, eval_dataset, model, algorithm, config_path)
    if monitor_type not in (None, "tensorboard"):
        raise UsageError(f"monitor_type = {monitor_type!r}: must be tensorboard, for which results are written")
    stamp = datetime.now().strftime("%Y%m%d%H%M%S")  # noqa: DTZ005 (a folder's name, in the user's own time)
    project = project_name or plan.names.get("project") or "AgentScope"
    experiment = experiment_name or plan.names.get("experiment") or f"Experiment-{stamp}"
    folder = Path(plan.names.get("root") or "checkpoints") / project / plan.names.get("group", "") / experiment

    async def play(task: Any, run: Run) -> float:
        models = {
            name: auxiliary_model(run, name, model_of_name) for name, model_of_name in (auxiliary_models or {}).items()
        }
        reward, metrics = await run_and_judge(workflow_func, judge_func, models, task, chat_model(run, plan.model))
        run.reward(reward, role="agent", metrics=metrics)
        return reward

    with stack_for(plan.model.model_path, plan.settings, private=plan.private) as stack:
        blocking(_train(stack, plan, play, folder))
        _monitor(stack, folder)


@dataclass
class Plan:
    """Parsed arguments of `tune`. `private` are settings that only a private stack accepts."""

    model: Any
    algorithm: Any
    rows: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    steps: int
    settings: dict[str, object]
    private: dict[str, object]
    tasks_per_step: int
    names: Mapping[str, str]
    """Parts of the results folder that a Trinity YAML names."""


def _plan(train: Any, held_out: Any, model: Any, algorithm: Any, config_path: str | None) -> Plan:
    file = _TrinityFile(Path(config_path)) if config_path is not None else None
    if file is not None:
        train, model, algorithm = train or file.dataset(), model or file.model(), algorithm or file.algorithm()
        file.check()
    if train is None or model is None:
        raise UsageError("train_dataset and model: must be given, or a config_path that has them")
    algorithm = algorithm or AlgorithmConfig()
    _check(model, algorithm, held_out)
    rows = rows_of(train)
    per_step = min(whole_number("batch_size", algorithm.batch_size), len(rows))
    group = whole_number("group_size", algorithm.group_size)
    settings: dict[str, object] = {
        **(file.settings if file else {}),
        "trainer.algorithm": ALGORITHMS.get(algorithm.algorithm_type, algorithm.algorithm_type),
        "trainer.optimizer.learning_rate": real_number("learning_rate", algorithm.learning_rate),
        "trainer.batch_experiences": per_step * group,
    }
    if file is not None and file.settings.get("trainer.batch_experiences", per_step * group) != per_step * group:
        raise UsageError(
            f"buffer.train_batch_size = {file.settings['trainer.batch_experiences']}: a step has {per_step} tasks with "
            f"{group} runs each; set it to {per_step * group}, or leave it out"
        )
    if group > 1:
        settings["trainer.group_size"] = group
    private: dict[str, object] = {}
    plain = TunerModelConfig(model_path="")
    for name, setting, value in (
        ("tool_call_parser", "inference.tool_parser", model.tool_call_parser),
        ("reasoning_parser", "inference.reasoning_parser", PARSERS.get(model.reasoning_parser, model.reasoning_parser)),
    ):
        (private if getattr(model, name) == getattr(plain, name) else settings)[setting] = value
    if model.max_model_len is not None:
        settings["inference.torch.context_tokens_max"] = whole_number("max_model_len", model.max_model_len)
    epochs = whole_number("total_epochs", train.total_epochs)
    steps = -(-len(rows) * epochs // per_step)
    if train.total_steps is not None:
        steps = whole_number("total_steps", train.total_steps)
    if "trainer.max_steps" in settings:
        steps = min(steps, whole_number("trainer.total_steps", settings["trainer.max_steps"]))
    names = file.names if file else {}
    tests = rows_of(held_out) if held_out else []
    return Plan(model, algorithm, rows, tests, steps, settings, private, per_step, names)


def _check(model: Any, algorithm: Any, held_out: Any) -> None:
    check_engines(model)
    sampling_options(model)
    sampled = "answers must be sampled from the whole distribution to be trained"
    if real_number("temperature", model.temperature) <= 0:
        raise UsageError(f"temperature = {model.temperature}: {sampled}; set a temperature above 0")
    check_unchanged(model, {"top_p": (1.0, f"{sampled}; leave it at 1")})
    for name in ("save_interval_steps", "eval_interval_steps"):
        whole_number(name, getattr(algorithm, name))
    if held_out is None:
        every = AlgorithmConfig().eval_interval_steps
        check_unchanged(
            algorithm, {"eval_interval_steps": (every, "has no effect without eval_dataset; pass one, or leave it out")}
        )
    else:
        check_schedule(held_out, "eval_dataset")


class _TrinityFile:
    """Configuration of the tuner that a Trinity YAML file contains. `check` refuses keys without an effect."""

    def __init__(self, path: Path) -> None:
        from headrace_operations import trinity_yaml

        converted = trinity_yaml.convert(trinity_yaml.read(path))
        if converted.refused:
            raise UsageError(f"{path}: {'; '.join(converted.refused)}")
        self._path, self._keys = path, converted.keys
        self._unread = {**converted.settings, **converted.data}
        labels = [(self._keys[name], _LABELS[name]) for name in _LABELS if self._take(name) is not None]
        if unused_keys := [f"{key}: {reason}" for key, reason in (*converted.idle, *labels)]:
            log.warning("%s: these keys have no effect here: %s", path, "; ".join(unused_keys))
        parts = {"root": "data_dir", "project": "data.project", "group": "data.group", "experiment": "data.name"}
        self.names = {part: str(value) for part, name in parts.items() if (value := self._take(name)) is not None}
        base = self._take("trainer.base")
        for name in (
            "trainer.model",
            "trainer.lineage",
            "gateway.model_aliases",
        ):  # derived from the base's name; `attach` sets them
            self._take(name)
        self._model = {"model_path": base} if base else None
        fields = {
            "max_model_len": "inference.torch.context_tokens_max", "tool_call_parser": "inference.tool_parser",
            "reasoning_parser": "inference.reasoning_parser", "temperature": "data.temperature", "top_p": "data.top_p",
            "max_tokens": "data.max_tokens", "enable_thinking": "data.enable_thinking",
            "tensor_parallel_size": "data.tensor_parallel_size", "inference_engine_num": "data.engine_num",
        }  # fmt: skip
        self._options = self._fields(fields)
        self._algorithm = self._fields({
            "algorithm_type": "trainer.algorithm", "learning_rate": "trainer.optimizer.learning_rate",
            "group_size": "trainer.group_size", "batch_size": "data.tasks_per_step",
            "save_interval_steps": "data.save_interval",
        })  # fmt: skip
        self._rows = self._fields({
            "path": "data.path", "name": "data.subset", "split": "data.split", "total_epochs": "data.epochs",
            "total_steps": "data.steps",
        })  # fmt: skip
        prefixes = ("trainer.", "inference.torch.")
        self.settings = {name: self._take(name) for name in list(self._unread) if name.startswith(prefixes)}
        if "buffer.train_batch_size" not in self._keys.values():
            self.settings.pop("trainer.batch_experiences", None)

    def model(self) -> TunerModelConfig | None:
        return TunerModelConfig(**self._model, **self._options) if self._model else None

    def algorithm(self) -> AlgorithmConfig:
        return AlgorithmConfig(**self._algorithm)

    def dataset(self) -> DatasetConfig | None:
        return DatasetConfig(**{"split": "train", **self._rows}) if "path" in self._rows else None

    def check(self) -> None:
        """Raise `UsageError` for the first key that a private Headrace does not read from the file."""
        for name, value in self._unread.items():
            raise UsageError(
                f"{self._path}: {self._keys.get(name, name)} = {value!r}: a private Headrace does not read it from "
                "this file; leave it out, or attach to a Headrace that was started with it"
            )

    def _take(self, name: str) -> Any:
        return self._unread.pop(name, None)

    def _fields(self, names: Mapping[str, str]) -> dict[str, Any]:
        values = {field: self._take(name) for field, name in names.items()}
        return {field: value for field, value in values.items() if value is not None}


async def _train(stack: Stack, plan: Plan, play: Callable[[Any, Run], Any], folder: Path) -> None:
    (folder / "monitor" / "tensorboard").mkdir(parents=True, exist_ok=True)
    sizes = {"group_size": int(plan.algorithm.group_size), "tasks_per_step": plan.tasks_per_step, "steps": plan.steps}
    async for step in train_on_tasks(stack, plan.rows, play, **sizes):
        numbers = _numbers(step)
        last = step.number == plan.steps
        if plan.held_out and (last or step.number % plan.algorithm.eval_interval_steps == 0):
            evaluation = await evaluate(stack, plan.held_out, play, {"reward": lambda _task, reward: reward})
            numbers |= {"eval/reward": evaluation.means["reward"].mean, "eval/errors": float(len(evaluation.errors))}
        with (folder / "monitor" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step.number, **numbers}) + "\n")
        if step.champion and (last or step.number % plan.algorithm.save_interval_steps == 0):
            _save(stack, step.champion, folder / f"global_step_{step.number}")


def _numbers(step: Step) -> dict[str, float | None]:
    rollout = {"rollout/reward": step.reward_mean, "rollout/errors": float(len(step.errors))}
    return {**rollout, **{f"rollout/{name}": value for name, value in step.run_metrics.items()}, **step.metrics}


def _save(stack: Stack, version: str, folder: Path) -> None:
    """Write the name of a version to the folder of results, and the version's files if they are on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version").write_text(f"{version}\n", encoding="utf-8")
    if stack.data_dir is not None:
        stack.export(version, folder / "actor" / "huggingface")


def _monitor(stack: Stack, folder: Path) -> None:
    if stack.data_dir is not None:
        tensorboard = stack.data_dir / "trainer/tensorboard"
        shutil.copytree(tensorboard, folder / "monitor" / "tensorboard", dirs_exist_ok=True)
