"""AgentScope's tuner on Headrace: `from headrace.tuner import tune` replaces `from agentscope.tuner import tune`.

Functions, signatures and configuration objects are those of agentscope.tuner 1.0.21, whose own objects are accepted as
well. Training uses the entered stack (`headrace.stack`), or a private one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.selection.models import avg_time_judge, avg_token_consumption_judge, select_model
    from headrace.selection.prompts import tune_prompt
    from headrace.tuner.configs import (
        AlgorithmConfig,
        DatasetConfig,
        JudgeOutput,
        PromptTuneConfig,
        TinkerConfig,
        TunerModelConfig,
        WorkflowOutput,
    )
    from headrace.tuner.functions import check_judge_function, check_workflow_function
    from headrace.tuner.tuning import tune
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "headrace.tuner.configs": (
                "AlgorithmConfig", "DatasetConfig", "JudgeOutput", "PromptTuneConfig", "TinkerConfig",
                "TunerModelConfig", "WorkflowOutput",
            ),
            "headrace.tuner.functions": ("check_judge_function", "check_workflow_function"),
            "headrace.selection.prompts": ("tune_prompt",),
            "headrace.selection.models": ("avg_time_judge", "avg_token_consumption_judge", "select_model"),
            "headrace.tuner.tuning": ("tune",),
        },
    )  # fmt: skip

__all__ = [
    "AlgorithmConfig", "DatasetConfig", "JudgeOutput", "PromptTuneConfig", "TinkerConfig", "TunerModelConfig",
    "WorkflowOutput", "avg_time_judge", "avg_token_consumption_judge", "check_judge_function",
    "check_workflow_function", "select_model", "tune", "tune_prompt",
]  # fmt: skip
