"""Reward functions `fn(completions, **kwargs)`: a number for each completion; `ground_truth` is a list of as many."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import check_names, real_number
from headrace_schemas.plain_values import plain_number
from headrace_schemas.text import printable

RewardCallable = Callable[..., Sequence[float]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TOLERANCE = 1e-4


def accuracy(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the last number of the completion is that of the truth, or the texts are equal; else 0."""
    return [float(same(said, truth)) for said, truth in zip(completions, kwargs.get("ground_truth", ()), strict=True)]


def length_penalty(penalty_weight: float = 0.001, max_length: int = 1024) -> RewardCallable:
    """Accuracy less `penalty_weight` for each character above `max_length`."""

    def reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
        over = [max(0, len(said) - max_length) for said in completions]
        return [one - penalty_weight * more for one, more in zip(accuracy(completions, **kwargs), over, strict=True)]

    return reward


def step(step_bonus: float = 0.1) -> RewardCallable:
    """Accuracy and `step_bonus` for each line break, which ends a step."""

    def reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
        steps = [said.strip().count("\n") for said in completions]
        return [one + step_bonus * more for one, more in zip(accuracy(completions, **kwargs), steps, strict=True)]

    return reward


KINDS: dict[str, tuple[Callable[..., RewardCallable], tuple[str, ...], str]] = {
    "accuracy": (lambda: accuracy, (), "1 for a right answer, else 0"),
    "length_penalty": (length_penalty, ("penalty_weight", "max_length"), "accuracy less a penalty for length"),
    "step": (step, ("step_bonus",), "accuracy and a bonus for each step"),
}


def create_reward(reward_type: str = "accuracy", **options: Any) -> RewardCallable:
    """A reward function by its name: `accuracy`, `length_penalty` or `step`."""
    if reward_type not in KINDS:
        raise UsageError(f"reward_type {reward_type!r}: it is one of {', '.join(KINDS)}")
    make, known, _ = KINDS[reward_type]
    check_names(reward_type, options, known)
    return make(**{name: real_number(name, value) for name, value in options.items()})


def one(function: RewardCallable, completion: str, truth: Any, **columns: Any) -> float:
    """The reward of one completion. Raises `UsageError` where the function gives none: that is an error, and no 0."""
    found = list(function([completion], ground_truth=[truth], **{name: [value] for name, value in columns.items()}))
    try:
        (reward,) = found
        return plain_number(reward)
    except (TypeError, ValueError):
        shown = printable(repr(found))
        raise UsageError(
            f"the reward function returned {shown} for one completion; one finite number is wanted"
        ) from None


def same(said: str, truth: Any) -> bool:
    numbers = [_NUMBER.findall(str(text)) for text in (said, truth)]
    if all(numbers):
        values = [float(found[-1].replace(",", "")) for found in numbers]
        return abs(values[0] - values[1]) < _TOLERANCE
    return str(said).strip() == str(truth).strip()
