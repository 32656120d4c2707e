"""Trinity-RFT's workflow interface over Headrace. Nothing of Trinity is imported.

    from headrace.trinity import ModelWrapper, Task, Workflow  # in place of trinity.common.workflows

A workflow of theirs runs unchanged: it asks its `model` for an OpenAI client, calls it, and returns experiences with a
reward. `run_workflow` trains with it. `headrace trinity convert` turns Trinity's YAML files into settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.trinity.react import AgentScopeReActAgent, AgentScopeReActWorkflow
    from headrace.trinity.workflows import Workflow, run_workflow
    from headrace.trinity.wrappers import EID, ModelWrapper, TrinityExperience, TrinityTask
    from headrace.trinity.wrappers import TrinityExperience as Experience
    from headrace.trinity.wrappers import TrinityTask as Task
else:
    names = {
        "headrace.trinity.react": ("AgentScopeReActAgent", "AgentScopeReActWorkflow"),
        "headrace.trinity.wrappers": ("EID", "Experience", "ModelWrapper", "Task", "TrinityExperience", "TrinityTask"),
        "headrace.trinity.workflows": ("Workflow", "run_workflow"),
    }
    __getattr__, __dir__ = lazily(__name__, names)

__all__ = [
    "EID", "AgentScopeReActAgent", "AgentScopeReActWorkflow", "Experience", "ModelWrapper", "Task",
    "TrinityExperience", "TrinityTask", "Workflow", "run_workflow",
]  # fmt: skip
