"""Parameters of the training tool. Each parameter is honoured, or refused by name with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.hello_agents.rewards import KINDS
from headrace_operations.arguments import real_number, whole_number, yes_or_no
from headrace_schemas.values.text import closest, printable

DATA = ("dataset", "split", "max_samples")
SETTINGS: dict[str, tuple[str, Callable[[str, Any], object]]] = {
    "learning_rate": ("trainer.optimizer.learning_rate", real_number),
    "max_grad_norm": ("trainer.optimizer.gradient_norm_max", real_number),
    "lora_r": ("trainer.lora.rank", whole_number),
    "lora_rank": ("trainer.lora.rank", whole_number),
    "lora_alpha": ("trainer.lora.alpha", real_number),
    "seed": ("trainer.seed", partial(whole_number, least=0)),
    "kl_coef": ("trainer.loss.kl", real_number),
    "beta": ("trainer.loss.kl", real_number),
}
"""Parameters that are settings of the trainer, with the setting and the parser."""
REWARDS = tuple(dict.fromkeys(name for _, names, _ in KINDS.values() for name in names))
ONLY_GRPO = (
    "num_generations", "temperature", "max_new_tokens", "max_completion_length", "kl_coef", "beta", "reward_type",
    "custom_reward", *REWARDS,
)  # fmt: skip
LORA_ALONE = ("lora_r", "lora_rank", "lora_alpha")
TRAIN = (
    "algorithm", "model_name", "format", "reward_type", "num_epochs", "output_dir", "use_lora", "batch_size",
    "gradient_accumulation_steps", "custom_dataset", "custom_reward", "accelerate_config", "use_wandb",
    "use_tensorboard", *SETTINGS, "num_generations", "temperature", "max_new_tokens", "max_completion_length",
)  # fmt: skip
BY_ACTION: dict[str, tuple[str, ...]] = {
    "train": (*DATA, *TRAIN),
    "evaluate": (*DATA, "model_path", "use_lora"),
    "load_dataset": (*DATA, "format"),
    "create_reward": ("reward_type",),
}
PARAMETERS = ("action", *dict.fromkeys(name for names in BY_ACTION.values() for name in names))
_REASONS = {
    "wandb_project": "results are written for TensorBoard",
    "warmup_ratio": "the trainer has no schedule of the learning rate",
    "warmup_steps": "the trainer has no schedule of the learning rate",
    "lr_scheduler_type": "the trainer has no schedule of the learning rate",
    "fp16": "the trainer chooses the type from the device (trainer.compute)",
    "bf16": "the trainer chooses the type from the device (trainer.compute)",
    "save_steps": "the registry stores every version",
    "logging_steps": "every step is written for TensorBoard",
    "verbose": "see the logs of the services",
}


def check(action: str, parameters: Mapping[str, Any]) -> None:
    """Raise `UsageError` for the first parameter that has no effect in the action `action` of the training tool."""
    allowed = ["action", *BY_ACTION[action]]
    if action in ("train", "create_reward"):
        kind = str(parameters.get("reward_type", "accuracy"))
        allowed += KINDS[kind][1] if kind in KINDS else ()
    for name in parameters:
        if name not in allowed:
            raise UsageError(f"{printable(str(name))}: {_reason(str(name), action, allowed)}; leave it out")
    for name in ("use_lora", "use_wandb", "use_tensorboard"):
        if name in parameters:
            yes_or_no(name, parameters[name])
    if parameters.get("max_samples") is not None:
        whole_number("max_samples", parameters["max_samples"])
    if action == "train":
        _check_training(parameters)


def trainer_settings(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of the trainer that correspond to the parameters of the action `train`."""
    settings: dict[str, object] = {}
    for name, (setting, kind) in SETTINGS.items():
        if parameters.get(name) is not None:
            if setting in settings:
                raise UsageError(f"{name}: another parameter already sets {setting}; leave one of them out")
            settings[setting] = kind(name, parameters[name])
    return settings


def _check_training(parameters: Mapping[str, Any]) -> None:
    algorithm = str(parameters.get("algorithm", "sft")).lower()
    form = "sft" if algorithm == "sft" else "rl"
    if parameters.get("format", form) != form:
        raise UsageError(f"format = {parameters['format']!r}: {algorithm} trains on rows in the format {form!r}")
    if algorithm == "sft" and (conflicting := next((name for name in ONLY_GRPO if name in parameters), None)):
        raise UsageError(f"{conflicting}: applies only to grpo, and algorithm is sft; leave it out")
    if not parameters.get("use_lora", True) and (conflicting := next((n for n in LORA_ALONE if n in parameters), None)):
        raise UsageError(f"{conflicting}: applies only to adapters, and use_lora is false; leave one of them out")
    if parameters.get("use_wandb"):
        raise UsageError("use_wandb: results are written for TensorBoard; leave it out")
    if not parameters.get("use_tensorboard", True):
        raise UsageError("use_tensorboard = False: results are always written for TensorBoard; leave it out")
    if "custom_dataset" in parameters and (
        conflicting := next((n for n in ("dataset", "split") if n in parameters), None)
    ):
        raise UsageError(f"{conflicting}: custom_dataset already has the rows; leave one of them out")
    if "custom_reward" in parameters and (
        conflicting := next((n for n in ("reward_type", *REWARDS) if n in parameters), None)
    ):
        raise UsageError(f"{conflicting}: custom_reward already is the reward; leave one of them out")
    if {"max_new_tokens", "max_completion_length"} <= set(parameters):
        raise UsageError("max_completion_length: max_new_tokens sets the same limit; leave one of them out")


def _reason(name: str, action: str, allowed: list[str]) -> str:
    if name in _REASONS:
        return _REASONS[name]
    if name in PARAMETERS:
        return f"has no effect for the action {action}"
    similar = closest(name, allowed)
    hint = f"did you mean {similar!r}?" if similar else f"the parameters are {', '.join(allowed)}"
    return f"is not a parameter of the action {action}; {hint}"
