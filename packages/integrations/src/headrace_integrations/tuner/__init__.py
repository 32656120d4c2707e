"""AgentScope's tuner on Headrace: `from headrace.tuner import tune` replaces `from agentscope.tuner import tune`.

Functions, signatures and configuration objects are those of agentscope.tuner 1.0.21, whose own objects are accepted as
well. Training uses the entered stack (`headrace.stack`), or a private one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.selection import avg_time_judge, avg_token_consumption_judge, select_model, tune_prompt
    from headrace_integrations.tuner.configs import (
        AlgorithmConfig,
        DatasetConfig,
        JudgeOutput,
        PromptTuneConfig,
        TinkerConfig,
        TunerModelConfig,
        WorkflowOutput,
        check_judge_function,
        check_workflow_function,
    )
    from headrace_integrations.tuner.tuning import tune
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.tuner.configs": (
                "AlgorithmConfig", "DatasetConfig", "JudgeOutput", "PromptTuneConfig", "TinkerConfig",
                "TunerModelConfig", "WorkflowOutput", "check_judge_function", "check_workflow_function",
            ),
            "headrace_integrations.selection": (
                "avg_time_judge", "avg_token_consumption_judge", "select_model", "tune_prompt",
            ),
            "headrace_integrations.tuner.tuning": ("tune",),
        },
    )  # fmt: skip

__all__ = [
    "AlgorithmConfig", "DatasetConfig", "JudgeOutput", "PromptTuneConfig", "TinkerConfig", "TunerModelConfig",
    "WorkflowOutput", "avg_time_judge", "avg_token_consumption_judge", "check_judge_function",
    "check_workflow_function", "select_model", "tune", "tune_prompt",
]  # fmt: skip
