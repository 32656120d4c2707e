"""HelloAgents' training tool on Headrace: `from headrace.hello_agents import RLTrainingTool`.

The interface is that of hello-agents 0.2.5; its code is not used. Models are folders on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.hello_agents.rewards import create_reward
    from headrace_integrations.hello_agents.tool import AgenticRLPipeline, RLTrainingTool
    from headrace_integrations.practice.data_sets import check_rows
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.practice.data_sets": ("check_rows",),
            "headrace_integrations.hello_agents.rewards": ("create_reward",),
            "headrace_integrations.hello_agents.tool": ("AgenticRLPipeline", "RLTrainingTool"),
        },
    )

__all__ = ["AgenticRLPipeline", "RLTrainingTool", "check_rows", "create_reward"]
