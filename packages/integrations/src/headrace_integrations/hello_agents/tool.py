"""The training tool of HelloAgents: `RLTrainingTool` runs single actions, `AgenticRLPipeline` a fixed sequence.

Actions are dictionaries, results are JSON. The pipeline, configured by a JSON file, loads data, trains with sft,
evaluates, trains the result with grpo, and evaluates again. Data sets are registered ones, files, folders, and `gsm8k`
through the package datasets.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.blocking import blocking
from headrace.errors import HeadraceError, UsageError
from headrace_integrations.evaluation import EvaluatedVersion, evaluate
from headrace_integrations.hello_agents.parameters import DATA, PARAMETERS, REWARDS, check, trainer_settings
from headrace_integrations.hello_agents.rewards import KINDS, RewardCallable, create_reward, reward_of_completion
from headrace_integrations.hello_agents.rewards import accuracy as rewards_of_accuracy
from headrace_integrations.practice.data_sets import check_rows, rows_of
from headrace_integrations.practice.runs import Run
from headrace_integrations.practice.training import train_on_tasks
from headrace_integrations.stack import Stack, stack_for
from headrace_integrations.stack.attaching import train_rows
from headrace_operations.accelerate_yaml import settings_of_accelerate
from headrace_operations.arguments import real_number, whole_number
from headrace_schemas.values.text import printable, read_user_text

FORMATS = ("sft", "rl")
_NAMES = {"gsm8k": ("openai/gsm8k", "main")}
_QUESTION_COLUMNS = ("question", "prompt", "problem")
_ANSWER_COLUMNS = ("completion", "answer", "full_answer", "ground_truth")


def load_rows(
    dataset: str, registered: Mapping[str, Any], form: str, split: str, samples: int | None = None
) -> list[dict[str, Any]]:
    """Return up to `samples` rows of a data set with the columns that the tool uses.

    Raises `UsageError` for invalid rows.
    """
    if form not in FORMATS:
        raise UsageError(f"format = {form!r}: must be one of {', '.join(FORMATS)}")
    if dataset in registered:
        rows_of_dataset = [dict(row) for row in registered[dataset]]
    else:
        path, name = _NAMES.get(dataset, (dataset, None))
        rows_of_dataset = rows_of(SimpleNamespace(path=path, name=name, split=split))
    rows = [_row(row, form) for row in rows_of_dataset[:samples]]
    check_rows(rows)
    return rows


def _row(row: Mapping[str, Any], form: str) -> dict[str, Any]:
    question = next((row[name] for name in _QUESTION_COLUMNS if row.get(name) is not None), None)
    answer = next((row[name] for name in _ANSWER_COLUMNS if row.get(name) is not None), None)
    if question is None or answer is None:
        raise UsageError(
            f"a row has the columns {', '.join(map(str, row))}: "
            f"must have one of {', '.join(_QUESTION_COLUMNS)} and one of "
            f"{', '.join(_ANSWER_COLUMNS)}"
        )
    if form == "sft":
        return {"prompt": str(question), "completion": str(answer), "text": f"{question}\n{answer}"}
    truth = row.get("ground_truth", str(answer).rpartition("####")[2].strip())
    return {"prompt": str(question), "ground_truth": str(truth), "question": str(question), "full_answer": str(answer)}


LORA = {"trainer.lora.rank": 16, "trainer.lora.alpha": 32.0, "trainer.lora.targets": ["q_proj", "v_proj"]}
MERGED = "merged"
"""Name of the folder, within the folder of an adapter, with adapter and base merged into one model."""
_ANSWER_TOKENS = 128
_GROUP = 4


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Sampling parameters of GRPO and settings of the trainer, from the parameters of the action `train`.

    Attributes:
        group: number of answers to each prompt.
        tokens_max: token limit of an answer.
        settings: settings of the trainer.
    """

    group: int
    temperature: float
    tokens_max: int
    settings: Mapping[str, object]

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> TrainingPlan:
        """Parse the parameters of the action `train`. Raises `UsageError` for an invalid value."""
        temperature = real_number("temperature", parameters.get("temperature", 1.0))
        if not 0 < temperature <= 2:
            raise UsageError(f"temperature = {temperature:g}: must be above 0 and at most 2, so that answers differ")
        length = "max_new_tokens" if "max_new_tokens" in parameters else "max_completion_length"
        tokens_max = whole_number(length, parameters.get(length, _ANSWER_TOKENS))
        group = whole_number("num_generations", parameters.get("num_generations", _GROUP), least=2)
        return cls(group, temperature, tokens_max, trainer_settings(parameters))


class RLTrainingTool:
    """Training tool with the interface of hello-agents: `run({"action": ...})`.

    Args:
        settings: settings of Headrace by dotted name, for each stack that the tool starts.
    """

    name = "rl_training"

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self._settings = dict(settings or {})
        self._datasets: dict[str, Any] = {}
        self._rewards: dict[str, RewardCallable] = {}

    def register_dataset(self, name: str, dataset: Any) -> None:
        """Register rows under a name: a list of dictionaries, or any iterable of such rows."""
        self._datasets[name] = dataset

    def register_reward_function(self, name: str, function: RewardCallable) -> None:
        """Register `fn(completions, **kwargs)` as the reward function of the data set `name`."""
        self._rewards[name] = function

    def get_parameters(self) -> list[dict[str, Any]]:
        return [{"name": name, "required": name == "action"} for name in PARAMETERS]

    def run(self, parameters: Mapping[str, Any]) -> str:
        """Run an action and return its result as JSON.

        The result has `status`; a failed action adds `message` and `traceback` and raises no exception.
        """
        actions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "train": self._train, "evaluate": self._evaluate, "load_dataset": self._load, "create_reward": self._reward,
        }  # fmt: skip
        try:
            action = actions.get(str(parameters.get("action")))
            if action is None:
                raise UsageError(f"action = {parameters.get('action')!r}: must be one of {', '.join(actions)}")
            check(str(parameters["action"]), parameters)
            result = {"status": "success", **action(parameters)}
        except Exception as error:  # noqa: BLE001 (the interface returns errors as JSON)
            result = {"status": "error", "message": str(error), "traceback": traceback.format_exc()}
        return json.dumps(result, indent=2, ensure_ascii=False)

    def _train(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        trainers = {"sft": self._sft, "grpo": self._grpo}
        kind, out = str(parameters.get("algorithm", "sft")).lower(), Path(parameters.get("output_dir", "./output"))
        if kind not in trainers:
            raise UsageError(f"algorithm = {kind!r}: must be one of {', '.join(trainers)}")
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"output_dir = {out}: must be a new or empty folder")
        dataset = str(parameters.get("dataset", "gsm8k"))
        custom = parameters.get("custom_dataset")
        if custom is not None:
            rows = list(custom)[: parameters.get("max_samples")]
        else:
            rows = self._rows(parameters, "sft" if kind == "sft" else "rl", None)
        name, epochs = str(parameters["model_name"]), whole_number("num_epochs", parameters.get("num_epochs", 3))
        registered = self._rewards.get(dataset)
        if registered and (
            conflicting := next((n for n in ("custom_reward", "reward_type", *REWARDS) if n in parameters), None)
        ):
            raise UsageError(
                f"{conflicting}: the data set {dataset!r} already has a registered reward function; leave it out"
            )
        plan = TrainingPlan.of(parameters)
        settings = {**(LORA if parameters.get("use_lora", True) else {}), **plan.settings, **_accelerate(parameters)}
        batch = whole_number("batch_size", parameters.get("batch_size", 4))
        batch *= whole_number("gradient_accumulation_steps", parameters.get("gradient_accumulation_steps", 1))
        settings |= {"trainer.batch_experiences": batch * (plan.group if kind == "grpo" else 1)}
        if kind == "grpo":
            settings |= {"trainer.algorithm": "grpo", "trainer.group_size": plan.group}
        settings |= self._settings
        with stack_for(base_of(name), settings) as stack:
            reward = parameters.get("custom_reward") or registered or reward_function_of(parameters)
            version = trainers[kind](stack, list(rows), epochs, reward, plan)
            write(stack, version, out)
        summary = {"algorithm": kind.upper(), "model": name, "output_dir": str(out), "num_epochs": epochs}
        return {**summary, "dataset_size": len(rows), "version": version}

    def _sft(self, stack: Stack, rows: list[dict[str, Any]], epochs: int, _: RewardCallable, plan: TrainingPlan) -> str:
        stack_settings = stack.settings()
        names = ("trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.targets", "trainer.batch_experiences")
        settings = {**{name: stack_settings[name] for name in names}, **plan.settings, **self._settings}
        pairs = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
        return train_rows(stack, "sft", pairs, epochs=epochs, settings=settings)

    def _grpo(
        self, stack: Stack, rows: list[dict[str, Any]], epochs: int, reward: RewardCallable, plan: TrainingPlan
    ) -> str:
        group = plan.group
        per_step = min(len(rows), int(stack.settings()["trainer.batch_experiences"]) // group)

        async def play(task: Mapping[str, Any], run: Run) -> None:
            text = await answer(run, str(task["prompt"]), plan.temperature, plan.tokens_max)
            value = reward_of_completion(reward, text, task["ground_truth"])
            run.reward(value, metrics={"accuracy": accuracy_of(task, text)})

        async def steps() -> str | None:
            count, champion = -(-len(rows) * epochs // per_step), None
            sizes = {"group_size": group, "tasks_per_step": per_step, "steps": count}
            async for step in train_on_tasks(stack, rows, play, **sizes):
                champion = step.champion
            return champion

        return str(blocking(steps()))

    def _evaluate(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate the weights in the folder `model_path`.

        `use_lora` must be true exactly if the folder contains an adapter.
        """
        path = str(parameters["model_path"])
        is_adapter = (Path(path) / "adapter_config.json").is_file()
        if parameters.get("use_lora", is_adapter) != is_adapter:
            contents = "an adapter" if is_adapter else "a whole model and no adapter"
            raise UsageError(f"use_lora = {parameters['use_lora']}: {path} contains {contents}; leave use_lora out")
        rows = self._rows(parameters, "rl", 100, "test")
        reward = self._rewards.get(str(parameters.get("dataset", "gsm8k"))) or rewards_of_accuracy

        async def play(task: Mapping[str, Any], run: Run) -> str:
            return await answer(run, str(task["prompt"]), 0.0)

        with stack_for(base_of(path), self._settings) as stack:
            device = stack.settings()["trainer.compute.device"]
            metrics = {
                "accuracy": accuracy_of,
                "reward": lambda task, text: reward_of_completion(reward, text, task["ground_truth"]),
            }
            evaluation: EvaluatedVersion = blocking(evaluate(stack, rows, play, metrics))
        shares = {name: mean.mean for name, mean in evaluation.means.items()}
        if shares["accuracy"] is None or shares["reward"] is None:
            reason = evaluation.errors[:1] or "the reward function failed"
            raise UsageError(f"none of {len(rows)} samples has a reward: {reason}")
        summary = {
            "accuracy": f"{shares['accuracy']:.2%}",
            "average_reward": f"{shares['reward']:.4f}",
            "device": device,
        }
        return {"model_path": path, "num_samples": len(rows), **summary, "failed": len(evaluation.errors)}

    def _load(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        form, split = str(parameters.get("format", "sft")), parameters.get("split", "train")
        rows = self._rows(parameters, form, 100)
        return {"format": form, "split": split, "dataset_size": len(rows), "sample_keys": list(rows[0])}

    def _reward(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        kind = str(parameters.get("reward_type", "accuracy"))
        reward_function_of(parameters)
        options = {name: parameters[name] for name in KINDS[kind][1] if name in parameters}
        return {"reward_type": kind, **options, "description": KINDS[kind][2]}

    def _rows(
        self, parameters: Mapping[str, Any], form: str, samples: int | None, default: str = "train"
    ) -> list[dict[str, Any]]:
        count = parameters.get("max_samples", samples)
        dataset, split = str(parameters.get("dataset", "gsm8k")), str(parameters.get("split", default))
        if dataset in self._datasets and "split" in parameters:
            raise UsageError(
                f"split = {split!r}: the data set {dataset!r} is registered and has no splits; leave split out"
            )
        return load_rows(dataset, self._datasets, form, split, count)


async def answer(run: Run, prompt: str, temperature: float, tokens_max: int = _ANSWER_TOKENS) -> str:
    """Return the text of the model's answer to a prompt."""
    completion = await run.openai().chat.completions.create(
        model=run.model,
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        max_tokens=tokens_max,
    )
    return completion.choices[0].message.content or ""


def reward_function_of(parameters: Mapping[str, Any]) -> RewardCallable:
    """Return the reward function that the parameters of an action select."""
    kind = str(parameters.get("reward_type", "accuracy"))
    names = KINDS[kind][1] if kind in KINDS else ()
    return create_reward(kind, **{name: parameters[name] for name in names if name in parameters})


def accuracy_of(task: Mapping[str, Any], text: str) -> float:
    """Return 1 if a text answers the task correctly, otherwise 0."""
    return rewards_of_accuracy([text], ground_truth=[task["ground_truth"]])[0]


def _accelerate(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Return the trainer settings for the parameter `accelerate_config`, a file for `accelerate launch
    --config_file`.
    """
    if "accelerate_config" not in parameters:
        return {}
    return settings_of_accelerate(parameters["accelerate_config"])


def base_of(path: str) -> str:
    """Return the folder of the base model for a training.

    For an adapter that this tool wrote, it is the merged model within the adapter's folder.
    """
    merged = Path(path) / MERGED
    return str(merged) if (Path(path) / "adapter_config.json").is_file() and merged.is_dir() else path


def write(stack: Stack, version: str, out: Path) -> None:
    """Write a version to `out`: whole weights, or an adapter that PEFT loads, together with the merged model."""
    stack.export(version, out)
    if (out / "adapter_config.json").is_file():
        stack.export(version, out / MERGED, merge=True)


_SECTIONS = {"model", "sft", "grpo", "eval"}
_SET_BY_PIPELINE = {"action", "algorithm", "model_name", "model_path"}
"""Parameters that the pipeline sets itself."""


class AgenticRLPipeline:
    """Pipeline of training and evaluation stages. A stage that fails raises `HeadraceError`.

    The configuration file has `model.base_model`, `sft` and `grpo` with `output_dir`, `num_epochs` and `batch_size`,
    and `eval.max_samples`. `sft`, `grpo` and `eval` may have any other parameter of the tool.
    """

    def __init__(self, config_path: str, rl_tool: RLTrainingTool | None = None) -> None:
        try:
            self.config: dict[str, Any] = json.loads(read_user_text(Path(config_path)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"{config_path} is not valid JSON: {error}") from None
        except ValueError as error:
            raise UsageError(f"{config_path} {error}") from None
        if not isinstance(self.config, dict) or not all(isinstance(section, dict) for section in self.config.values()):
            raise UsageError(f"{config_path}: must be an object with the sections {', '.join(sorted(_SECTIONS))}")
        missing = _SECTIONS - set(self.config)
        if missing:
            raise UsageError(f"{config_path}: the section {min(missing)!r} is missing; add it")
        unknown = [
            *(set(self.config) - _SECTIONS),
            *(f"model.{name}" for name in set(self.config["model"]) - {"base_model"}),
            *(f"{stage}.{name}" for stage in self.config for name in _SET_BY_PIPELINE & set(self.config[stage])),
        ]
        if unknown:
            raise UsageError(f"{config_path}: {printable(min(unknown))} has no effect here; leave it out")
        self.rl_tool = rl_tool or RLTrainingTool()
        self.results: dict[str, Any] = {}

    def stage1_prepare_data(self) -> None:
        """Load the data sets of the stages, so that invalid data are reported before training."""
        for stage, form in (("sft", "sft"), ("grpo", "rl")):
            data = {name: value for name, value in self.config[stage].items() if name in DATA}
            parameters = {**data, "action": "load_dataset", "format": form}
            self.results[f"{stage}_data"] = self._run_tool(parameters)

    def stage2_sft_training(self) -> str:
        return self._train("sft", self.config["model"]["base_model"])

    def stage3_sft_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluate("sft", model_path)

    def stage4_grpo_training(self, sft_model_path: str) -> str:
        """Train the model that the sft stage produced with grpo, and return the folder of the result."""
        return self._train("grpo", sft_model_path)

    def stage5_grpo_evaluation(self, model_path: str) -> dict[str, Any]:
        return self._evaluate("grpo", model_path)

    def run(self) -> dict[str, Any]:
        """Run every stage and return the results by stage."""
        self.stage1_prepare_data()
        sft = self.stage2_sft_training()
        self.stage3_sft_evaluation(sft)
        grpo = self.stage4_grpo_training(sft)
        self.stage5_grpo_evaluation(grpo)
        return self.results

    def _train(self, algorithm: str, model_name: str) -> str:
        section = {"use_lora": True, **self.config[algorithm]}
        result = self._run_tool({**section, "action": "train", "algorithm": algorithm, "model_name": model_name})
        self.results[f"{algorithm}_training"] = result
        return str(result["output_dir"])

    def _evaluate(self, stage: str, model_path: str) -> dict[str, Any]:
        lora = self.config[stage].get("use_lora", True)
        result = self._run_tool(
            {"use_lora": lora, **self.config["eval"], "action": "evaluate", "model_path": model_path}
        )
        self.results[f"{stage}_evaluation"] = result
        return result

    def _run_tool(self, parameters: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.rl_tool.run(parameters))
        if result["status"] != "success":
            raise HeadraceError(f"{parameters['action']}: {result['message']}")
        return result
