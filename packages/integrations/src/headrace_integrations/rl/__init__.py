"""The names of AgentScope's article about agentic RL, implemented on running services.

Every call waits for its result. An agent is any object with a method `run(text)` and an OpenAI client
(`headrace.practice.agents`). A trainer uses the entered stack (`headrace.stack`), or starts a private stack that lasts
until the program ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.judging import DPOTrainer, HumanPreferenceCollector, LLMJudge, RewardFunction
    from headrace_integrations.practice.collecting import run_and_collect
    from headrace_integrations.rl.serving import ABTestFramework, HotUpdater, ModelManager
    from headrace_integrations.rl.training import DataCollector, OnlineTrainer, RLRuntime, TrinityRFT
    from headrace_integrations.scenarios import (
        GameTrainer,
        MathAgentTrainer,
        MultiAgentGame,
        ToolUseEvaluator,
        ToolUseTrainer,
        evaluate_win_rate,
    )
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.practice.collecting": ("run_and_collect",),
            "headrace_integrations.judging": ("DPOTrainer", "HumanPreferenceCollector", "LLMJudge", "RewardFunction"),
            "headrace_integrations.rl.serving": ("ABTestFramework", "HotUpdater", "ModelManager"),
            "headrace_integrations.rl.training": ("DataCollector", "OnlineTrainer", "RLRuntime", "TrinityRFT"),
            "headrace_integrations.scenarios.games": ("GameTrainer", "MultiAgentGame", "evaluate_win_rate"),
            "headrace_integrations.scenarios.maths": ("MathAgentTrainer",),
            "headrace_integrations.scenarios.tool_use": ("ToolUseEvaluator", "ToolUseTrainer"),
        },
    )

__all__ = [
    "ABTestFramework", "DPOTrainer", "DataCollector", "GameTrainer", "HotUpdater", "HumanPreferenceCollector",
    "LLMJudge", "MathAgentTrainer", "ModelManager", "MultiAgentGame", "OnlineTrainer", "RLRuntime", "RewardFunction",
    "ToolUseEvaluator", "ToolUseTrainer", "TrinityRFT", "evaluate_win_rate", "run_and_collect",
]  # fmt: skip
