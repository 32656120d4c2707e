"""Trinity-RFT's workflow interface on Headrace. Trinity itself is not imported.

    from headrace.trinity import ModelWrapper, Task, Workflow  # replaces trinity.common.workflows

A Trinity workflow runs unchanged: it gets an OpenAI client from its `model`, calls it, and returns experiences with a
reward. `run_workflow` trains with it, and `headrace trinity convert` converts Trinity's YAML files to settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.trinity.workflows import (
        EID,
        AgentScopeReActAgent,
        AgentScopeReActWorkflow,
        ModelWrapper,
        TrinityExperience,
        TrinityTask,
        Workflow,
        run_workflow,
    )
    from headrace_integrations.trinity.workflows import TrinityExperience as Experience
    from headrace_integrations.trinity.workflows import TrinityTask as Task
else:
    names = {
        "headrace_integrations.trinity.workflows": (
            "EID", "AgentScopeReActAgent", "AgentScopeReActWorkflow", "Experience", "ModelWrapper", "Task",
            "TrinityExperience", "TrinityTask", "Workflow", "run_workflow",
        ),
    }  # fmt: skip
    __getattr__, __dir__ = lazy_exports(__name__, names)

__all__ = [
    "EID", "AgentScopeReActAgent", "AgentScopeReActWorkflow", "Experience", "ModelWrapper", "Task",
    "TrinityExperience", "TrinityTask", "Workflow", "run_workflow",
]  # fmt: skip
