"""Trainers for three kinds of agents under the names of AgentScope's article: maths, tool use, multi-agent games."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.scenarios.games import GameTrainer, MultiAgentGame, evaluate_win_rate
    from headrace_integrations.scenarios.maths import MathAgentTrainer
    from headrace_integrations.scenarios.tool_use import ToolUseEvaluator, ToolUseTrainer
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.scenarios.games": ("GameTrainer", "MultiAgentGame", "evaluate_win_rate"),
            "headrace_integrations.scenarios.maths": ("MathAgentTrainer",),
            "headrace_integrations.scenarios.tool_use": ("ToolUseEvaluator", "ToolUseTrainer"),
        },
    )

__all__ = [
    "GameTrainer", "MathAgentTrainer", "MultiAgentGame", "ToolUseEvaluator", "ToolUseTrainer", "evaluate_win_rate",
]  # fmt: skip
