"""`RLTrainingTool`: actions as dictionaries, answers as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.evaluation.evaluating import EvaluatedVersion, evaluate
from headrace.hello_agents.data import load
from headrace.hello_agents.parameters import PARAMETERS, REWARDS, check, trainer_settings
from headrace.hello_agents.rewards import KINDS, RewardCallable, accuracy, create_reward, one
from headrace.practice.arguments import real_number, whole_number
from headrace.practice.blocking import blocking
from headrace.practice.practising import practise
from headrace.practice.runs import Run
from headrace.stack import Stack, stack_for
from headrace.stack.connection import support
from headrace.stack.offline import train_rows

LORA = {"trainer.lora.rank": 16, "trainer.lora.alpha": 32.0, "trainer.lora.targets": ["q_proj", "v_proj"]}
MERGED = "merged"
"""In the folder of an adapter: adapter and base as one model."""
_ANSWER_TOKENS = 128
_GROUP = 4


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How GRPO samples (answers to each prompt, temperature, longest answer), and settings that were named."""

    group: int
    temperature: float
    tokens_max: int
    settings: Mapping[str, object]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainingPlan:
        """Read the parameters of `train`. Raises `UsageError`."""
        temperature = real_number("temperature", given.get("temperature", 1.0))
        if not 0 < temperature <= 2:
            raise UsageError(f"temperature = {temperature:g}: must be above 0 and at most 2, so that answers differ")
        length = "max_new_tokens" if "max_new_tokens" in given else "max_completion_length"
        tokens_max = whole_number(length, given.get(length, _ANSWER_TOKENS))
        group = whole_number("num_generations", given.get("num_generations", _GROUP), least=2)
        return cls(group, temperature, tokens_max, trainer_settings(given))


class RLTrainingTool:
    """`run({"action": ...})`. `settings` are ours, by dotted name, for each stack that the tool starts."""

    name = "rl_training"

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self._settings = dict(settings or {})
        self._datasets: dict[str, Any] = {}
        self._rewards: dict[str, RewardCallable] = {}

    def register_dataset(self, name: str, dataset: Any) -> None:
        """Rows under a name: a list of dictionaries, or anything that gives such rows."""
        self._datasets[name] = dataset

    def register_reward_function(self, name: str, function: RewardCallable) -> None:
        """`fn(completions, **kwargs)` for the data set of that name."""
        self._rewards[name] = function

    def get_parameters(self) -> list[dict[str, Any]]:
        return [{"name": name, "required": name == "action"} for name in PARAMETERS]

    def run(self, parameters: Mapping[str, Any]) -> str:
        """JSON with `status`; of an error `message` and `traceback`. Nothing is raised."""
        actions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "train": self._train, "evaluate": self._evaluate, "load_dataset": self._load, "create_reward": self._reward,
        }  # fmt: skip
        try:
            action = actions.get(str(parameters.get("action")))
            if action is None:
                raise UsageError(f"action {parameters.get('action')!r}: it is one of {', '.join(actions)}")
            check(str(parameters["action"]), parameters)
            found = {"status": "success", **action(parameters)}
        except Exception as error:  # noqa: BLE001 (the interface answers errors as JSON)
            found = {"status": "error", "message": str(error), "traceback": traceback.format_exc()}
        return json.dumps(found, indent=2, ensure_ascii=False)

    def _train(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kinds = {"sft": self._sft, "grpo": self._grpo}
        kind, out = str(given.get("algorithm", "sft")).lower(), Path(given.get("output_dir", "./output"))
        if kind not in kinds:
            raise UsageError(f"algorithm {kind!r}: it is one of {', '.join(kinds)}")
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"output_dir {out} is not empty; name a new folder")
        dataset = str(given.get("dataset", "gsm8k"))
        custom = given.get("custom_dataset")
        if custom is not None:
            rows = list(custom)[: given.get("max_samples")]
        else:
            rows = self._rows(given, "sft" if kind == "sft" else "rl", None)
        name, epochs = str(given["model_name"]), whole_number("num_epochs", given.get("num_epochs", 3))
        registered = self._rewards.get(dataset)
        if registered and (wrong := next((n for n in ("custom_reward", "reward_type", *REWARDS) if n in given), None)):
            raise UsageError(f"{wrong}: a reward function is registered for the data set {dataset!r}; leave it out")
        plan = TrainingPlan.of(given)
        settings = {**(LORA if given.get("use_lora", True) else {}), **plan.settings, **_accelerate(given)}
        batch = whole_number("batch_size", given.get("batch_size", 4))
        batch *= whole_number("gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1))
        settings |= {"trainer.batch_experiences": batch * (plan.group if kind == "grpo" else 1)}
        if kind == "grpo":
            settings |= {"trainer.algorithm": "grpo", "trainer.group_size": plan.group}
        settings |= self._settings
        with stack_for(base_of(name), settings) as stack:
            reward = given.get("custom_reward") or registered or made(given)
            version = kinds[kind](stack, list(rows), epochs, reward, plan)
            write(stack, version, out)
        told = {"algorithm": kind.upper(), "model": name, "output_dir": str(out), "num_epochs": epochs}
        return {**told, "dataset_size": len(rows), "version": version}

    def _sft(self, stack: Stack, rows: list[dict[str, Any]], epochs: int, _: RewardCallable, plan: TrainingPlan) -> str:
        known = stack.settings()
        names = ("trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.targets", "trainer.batch_experiences")
        settings = {**{name: known[name] for name in names}, **plan.settings, **self._settings}
        pairs = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
        return train_rows(stack, "sft", pairs, epochs=epochs, settings=settings)

    def _grpo(
        self, stack: Stack, rows: list[dict[str, Any]], epochs: int, reward: RewardCallable, plan: TrainingPlan
    ) -> str:
        group = plan.group
        per_step = min(len(rows), int(stack.settings()["trainer.batch_experiences"]) // group)

        async def play(task: Mapping[str, Any], run: Run) -> None:
            said = await answer(run, str(task["prompt"]), plan.temperature, plan.tokens_max)
            run.reward(one(reward, said, task["ground_truth"]), metrics={"accuracy": right(task, said)})

        async def steps() -> str | None:
            count, champion = -(-len(rows) * epochs // per_step), None
            async for step in practise(stack, rows, play, group_size=group, tasks_per_step=per_step, steps=count):
                champion = step.champion
            return champion

        return str(blocking(steps()))

    def _evaluate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """With the weights of `model_path`. `use_lora` has to be what the folder is."""
        path = str(given["model_path"])
        is_adapter = (Path(path) / "adapter_config.json").is_file()
        if given.get("use_lora", is_adapter) != is_adapter:
            holds = "an adapter" if is_adapter else "a whole model and no adapter"
            raise UsageError(f"use_lora = {given['use_lora']}: {path} holds {holds}; leave use_lora out")
        rows = self._rows(given, "rl", 100, "test")
        reward = self._rewards.get(str(given.get("dataset", "gsm8k"))) or accuracy

        async def play(task: Mapping[str, Any], run: Run) -> str:
            return await answer(run, str(task["prompt"]), 0.0)

        with stack_for(base_of(path), self._settings) as stack:
            device = stack.settings()["trainer.compute.device"]
            metrics = {"accuracy": right, "reward": lambda task, said: one(reward, said, task["ground_truth"])}
            found: EvaluatedVersion = blocking(evaluate(stack, rows, play, metrics))
        shares = {name: mean.mean for name, mean in found.means.items()}
        if shares["accuracy"] is None or shares["reward"] is None:
            why = found.errors[:1] or "the reward function failed"
            raise UsageError(f"none of {len(rows)} samples has a reward: {why}")
        told = {"accuracy": f"{shares['accuracy']:.2%}", "average_reward": f"{shares['reward']:.4f}", "device": device}
        return {"model_path": path, "num_samples": len(rows), **told, "failed": len(found.errors)}

    def _load(self, given: Mapping[str, Any]) -> dict[str, Any]:
        form, split = str(given.get("format", "sft")), given.get("split", "train")
        rows = self._rows(given, form, 100)
        return {"format": form, "split": split, "dataset_size": len(rows), "sample_keys": list(rows[0])}

    def _reward(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kind = str(given.get("reward_type", "accuracy"))
        made(given)
        shown = {name: given[name] for name in KINDS[kind][1] if name in given}
        return {"reward_type": kind, **shown, "description": KINDS[kind][2]}

    def _rows(
        self, given: Mapping[str, Any], form: str, samples: int | None, default: str = "train"
    ) -> list[dict[str, Any]]:
        count = given.get("max_samples", samples)
        dataset, split = str(given.get("dataset", "gsm8k")), str(given.get("split", default))
        if dataset in self._datasets and "split" in given:
            raise UsageError(
                f"split = {split!r}: the data set {dataset!r} was registered, and has no splits; leave it out"
            )
        return load(dataset, self._datasets, form, split, count)


async def answer(run: Run, prompt: str, temperature: float, tokens_max: int = _ANSWER_TOKENS) -> str:
    found = await run.openai().chat.completions.create(
        model=run.model,
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        max_tokens=tokens_max,
    )
    return found.choices[0].message.content or ""


def made(given: Mapping[str, Any]) -> RewardCallable:
    kind = str(given.get("reward_type", "accuracy"))
    names = KINDS[kind][1] if kind in KINDS else ()
    return create_reward(kind, **{name: given[name] for name in names if name in given})


def right(task: Mapping[str, Any], said: str) -> float:
    return accuracy([said], ground_truth=[task["ground_truth"]])[0]


def _accelerate(given: Mapping[str, Any]) -> dict[str, object]:
    """Of a file for `accelerate launch --config_file`, named as `accelerate_config`."""
    if "accelerate_config" not in given:
        return {}
    converter = support("headrace_cli.accelerate_yaml", "headrace-cli")
    return dict(converter.settings_of_accelerate(given["accelerate_config"]))


def base_of(path: str) -> str:
    """The folder to start from: of an adapter that was written here, the merged model beside it."""
    merged = Path(path) / MERGED
    return str(merged) if (Path(path) / "adapter_config.json").is_file() and merged.is_dir() else path


def write(stack: Stack, version: str, out: Path) -> None:
    """The version in `out`: whole weights, or an adapter that PEFT loads, with the merged model beside it."""
    stack.export(version, out)
    if (out / "adapter_config.json").is_file():
        stack.export(version, out / MERGED, merge=True)
