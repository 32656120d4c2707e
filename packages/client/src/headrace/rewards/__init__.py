"""Building blocks of reward functions, and a process that publishes rewards of a function of your own.

    from headrace.rewards import accuracy, guarded, too_long

    def answer(trajectory, context):
        reward = accuracy(trajectory.final_answer, context["expected"])
        return guarded(reward, too_long(trajectory.final_answer, length_max=400))

The functions take text and numbers and return a number from 0 to 1, or None to abstain. The functions of
`headrace.rewards.functions` take a trajectory and its context; list them by name in `scorer.functions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.rewards.answers import (
        ToolScore,
        accuracy,
        follows,
        length_penalty,
        normalized,
        numbers_in,
        steps,
        tool_score,
    )
    from headrace.rewards.combining import Calibrated, Calibration, TaskScale, composite, relative, standardized
    from headrace.rewards.functions import guarded, pleading, repetitive, too_long, tool_spam
    from headrace.rewards.natural_signals import Hint, hints, signals
    from headrace.rewards.serving import consume, serve, verdict
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace.rewards.answers": (
                "ToolScore",
                "accuracy",
                "follows",
                "length_penalty",
                "normalized",
                "numbers_in",
                "steps",
                "tool_score",
            ),
            "headrace.rewards.combining": (
                "Calibrated",
                "Calibration",
                "TaskScale",
                "composite",
                "relative",
                "standardized",
            ),
            "headrace.rewards.functions": ("guarded", "pleading", "repetitive", "tool_spam", "too_long"),
            "headrace.rewards.serving": ("consume", "serve", "verdict"),
            "headrace.rewards.natural_signals": ("Hint", "hints", "signals"),
        },
    )

__all__ = [
    "Calibrated",
    "Calibration",
    "Hint",
    "TaskScale",
    "ToolScore",
    "accuracy",
    "composite",
    "consume",
    "follows",
    "guarded",
    "hints",
    "length_penalty",
    "normalized",
    "numbers_in",
    "pleading",
    "relative",
    "repetitive",
    "serve",
    "signals",
    "standardized",
    "steps",
    "too_long",
    "tool_score",
    "tool_spam",
    "verdict",
]
