"""Trinity-RFT's workflow interface on Headrace. Trinity itself is not imported.

    from headrace.trinity import ModelWrapper, Task, Workflow  # replaces trinity.common.workflows

A Trinity workflow runs unchanged: it gets an OpenAI client from its `model`, calls it, and returns experiences with a
reward. `run_workflow` trains with it, and `headrace trinity convert` converts Trinity's YAML files to settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace_integrations.trinity.workflows import (
        AgentScopeReActAgent,
        AgentScopeReActWorkflow,
        Workflow,
        run_workflow,
    )
    from headrace_integrations.trinity.wrappers import EID, ModelWrapper, TrinityExperience, TrinityTask
    from headrace_integrations.trinity.wrappers import TrinityExperience as Experience
    from headrace_integrations.trinity.wrappers import TrinityTask as Task
else:
    names = {
        "headrace_integrations.trinity.wrappers": (
            "EID", "Experience", "ModelWrapper", "Task", "TrinityExperience", "TrinityTask",
        ),
        "headrace_integrations.trinity.workflows": (
            "AgentScopeReActAgent", "AgentScopeReActWorkflow", "Workflow", "run_workflow",
        ),
    }  # fmt: skip
    __getattr__, __dir__ = lazily(__name__, names)

__all__ = [
    "EID", "AgentScopeReActAgent", "AgentScopeReActWorkflow", "Experience", "ModelWrapper", "Task",
    "TrinityExperience", "TrinityTask", "Workflow", "run_workflow",
]  # fmt: skip
