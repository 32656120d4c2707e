"""Reward functions for `scorer.functions` and `headrace.rewards.serve`.

They read facts from the context of the trajectory, which is sent with turns or with feedback. Each function abstains if
its fact is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.rewards import answers, guards, tools
from headrace.rewards.combining import composite
from headrace_schemas import RewardResult

if TYPE_CHECKING:
    from headrace_schemas import Trajectory

Context = Mapping[str, Any]
_LENGTH_MAX = 4000


def accuracy(trajectory: Trajectory, context: Context) -> float | None:
    """Return whether the final answer is `context["expected"]`: a text, a number (within `tolerance`), or a list of
    right answers."""
    expected = context.get("expected")
    if expected is None:
        return None
    return answers.accuracy(trajectory.final_answer, expected, tolerance=float(context.get("tolerance", 1e-6)))


def answer_format(trajectory: Trajectory, context: Context) -> float | None:
    """Return whether the whole final answer matches the regular expression `context["format"]`, which may not use
    look-around or back-references."""
    pattern = context.get("format")
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        raise ValueError(
            f"context.format is of type {type(pattern).__name__}: must be a string with a regular expression"
        )
    return answers.follows(trajectory.final_answer, pattern)


def brevity(trajectory: Trajectory, context: Context) -> float:
    """Return 1 for a final answer of at most `length_max` characters (default 4000), falling to 0 at twice that
    length."""
    length_max = int(context.get("length_max", _LENGTH_MAX))
    return answers.length_penalty(1.0, len(trajectory.final_answer), length_max=length_max, weight=1.0)


def tool_correctness(trajectory: Trajectory, context: Context) -> RewardResult:
    """Score whether the calls of `expected_calls` were made with their arguments, and whether calls were valid and
    succeeded."""
    expected: Sequence[tools.Call] = context.get("expected_calls") or ()
    score = tools.tool_score(trajectory.messages, trajectory.tools, expected)
    shares = {"tool": score.tool, "arguments": score.arguments, "success": score.success, "invalid": score.invalid}
    criteria = {name: value for name, value in shares.items() if value is not None}
    return RewardResult(value=score.value, criteria=criteria if score.value is not None else {})


def guarded_accuracy(trajectory: Trajectory, context: Context) -> RewardResult:
    """Return `accuracy`, combined with the answer's format if the context has one, reduced by the worst exploit of the
    run."""
    answer = trajectory.final_answer
    reward = composite({"accuracy": accuracy(trajectory, context), "format": answer_format(trajectory, context)})
    if reward is None:
        return RewardResult()
    exploits = {
        "too_long": guards.too_long(answer, length_max=int(context.get("length_max", _LENGTH_MAX))),
        "repetitive": guards.repetitive(answer),
        "pleading": guards.pleading(answer),
        "tool_spam": guards.tool_spam(trajectory.messages),
    }
    return RewardResult(value=guards.guarded(reward, *exploits.values()), criteria=exploits)
