"""The names of AgentScope's article about agentic RL, on running services. Every call waits for its result.

An agent is any object with a method `run(text)` and an OpenAI client (`headrace.practice.agents`). A trainer uses the
entered stack (`headrace.stack`), or starts a private stack that lasts until the program ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.judging import DPOTrainer, HumanPreferenceCollector, LLMJudge, RewardFunction
    from headrace.practice.collecting import run_and_collect
    from headrace.rl.collection import DataCollector
    from headrace.rl.serving import ABTestFramework, HotUpdater, ModelManager
    from headrace.rl.training import OnlineTrainer, RLRuntime, TrinityRFT
    from headrace.scenarios import (
        GameTrainer,
        MathAgentTrainer,
        MultiAgentGame,
        ToolUseEvaluator,
        ToolUseTrainer,
        evaluate_win_rate,
    )
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "headrace.practice.collecting": ("run_and_collect",),
            "headrace.rl.collection": ("DataCollector",),
            "headrace.judging": ("DPOTrainer", "HumanPreferenceCollector", "LLMJudge", "RewardFunction"),
            "headrace.rl.serving": ("ABTestFramework", "HotUpdater", "ModelManager"),
            "headrace.rl.training": ("OnlineTrainer", "RLRuntime", "TrinityRFT"),
            "headrace.scenarios.games": ("GameTrainer", "MultiAgentGame", "evaluate_win_rate"),
            "headrace.scenarios.maths": ("MathAgentTrainer",),
            "headrace.scenarios.tool_use": ("ToolUseEvaluator", "ToolUseTrainer"),
        },
    )

__all__ = [
    "ABTestFramework", "DPOTrainer", "DataCollector", "GameTrainer", "HotUpdater", "HumanPreferenceCollector",
    "LLMJudge", "MathAgentTrainer", "ModelManager", "MultiAgentGame", "OnlineTrainer", "RLRuntime", "RewardFunction",
    "ToolUseEvaluator", "ToolUseTrainer", "TrinityRFT", "evaluate_win_rate", "run_and_collect",
]  # fmt: skip
