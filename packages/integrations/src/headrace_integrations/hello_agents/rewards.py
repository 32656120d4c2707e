"""Reward functions `fn(completions, **kwargs)` that return one number per completion.

`kwargs` contains `ground_truth`, a list of the right answers in the order of the completions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace_operations.arguments import check_names, real_number
from headrace_schemas.values.text import plain_number, printable

RewardCallable = Callable[..., Sequence[float]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TOLERANCE = 1e-4


def accuracy(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Return 1 for each completion whose last number or text equals the right answer, otherwise 0."""
    return [
        float(same(completion, truth))
        for completion, truth in zip(completions, kwargs.get("ground_truth", ()), strict=True)
    ]


def length_penalty(penalty_weight: float = 0.001, max_length: int = 1024) -> RewardCallable:
    """Return a reward function: accuracy minus `penalty_weight` for each character above `max_length`."""

    def reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
        excesses = [max(0, len(completion) - max_length) for completion in completions]
        scores = accuracy(completions, **kwargs)
        return [score - penalty_weight * excess for score, excess in zip(scores, excesses, strict=True)]

    return reward


def step(step_bonus: float = 0.1) -> RewardCallable:
    """Return a reward function: accuracy plus `step_bonus` for each line break, which ends a step."""

    def reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
        step_counts = [completion.strip().count("\n") for completion in completions]
        scores = accuracy(completions, **kwargs)
        return [score + step_bonus * count for score, count in zip(scores, step_counts, strict=True)]

    return reward


KINDS: dict[str, tuple[Callable[..., RewardCallable], tuple[str, ...], str]] = {
    "accuracy": (lambda: accuracy, (), "1 for a right answer, else 0"),
    "length_penalty": (length_penalty, ("penalty_weight", "max_length"), "accuracy less a penalty for length"),
    "step": (step, ("step_bonus",), "accuracy and a bonus for each step"),
}


def create_reward(reward_type: str = "accuracy", **options: Any) -> RewardCallable:
    """Return a reward function by its name: `accuracy`, `length_penalty` or `step`."""
    if reward_type not in KINDS:
        raise UsageError(f"reward_type = {reward_type!r}: must be one of {', '.join(KINDS)}")
    make, option_names, _ = KINDS[reward_type]
    check_names(reward_type, options, option_names)
    return make(**{name: real_number(name, value) for name, value in options.items()})


def reward_of_completion(function: RewardCallable, completion: str, truth: Any, **columns: Any) -> float:
    """Return the reward that a function gives one completion.

    Raises:
        UsageError: the function returns no finite number. This is never counted as a reward of 0.
    """
    returned = list(function([completion], ground_truth=[truth], **{name: [value] for name, value in columns.items()}))
    try:
        (reward,) = returned
        return plain_number(reward)
    except (TypeError, ValueError):
        result = printable(repr(returned))
        raise UsageError(
            f"the reward function returned {result} for one completion; it must return one finite number per completion"
        ) from None


def same(answer: str, truth: Any) -> bool:
    """Return whether an answer is correct: the last numbers of both texts are equal within the tolerance, or without
    numbers the texts are equal.
    """
    numbers = [_NUMBER.findall(str(text)) for text in (answer, truth)]
    if all(numbers):
        values = [float(matches[-1].replace(",", "")) for matches in numbers]
        return abs(values[0] - values[1]) < _TOLERANCE
    return str(answer).strip() == str(truth).strip()
