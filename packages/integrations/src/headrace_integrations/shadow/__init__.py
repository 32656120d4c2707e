"""Training copies: a copy of the agent plays a share of the users' requests again, and the copy's runs are trained.

    sink = HeadraceSink("http://127.0.0.1:8000", "my-agent")
    with TrainingRunner(sink, make_agent, reward, repeat=4) as runner: answer_user = runner.watched(agent.run)
    print(answer_user("Where is my order?"))

Only the user's own agent answers the user, and training copies cannot delay or fail a user's request. AgentScope's Java
training extension calls a training copy a shadow. The shadow of the registry is something else: an evaluation of a
candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.practice.sinks import (
        Door,
        HeadraceDoor,
        HeadraceSink,
        TrajectorySink,
        TrinityDoor,
        TrinitySink,
    )
    from headrace_integrations.shadow.runner import CopyCounts, TrainingRunner
    from headrace_integrations.shadow.selection import (
        ExplicitMarkingStrategy,
        SamplingRateStrategy,
        SelectionStrategy,
        ServedRequest,
        TrainingCopy,
        WriteRefused,
        mark,
        read_only,
    )
else:
    names = {
        "headrace_integrations.practice.sinks": (
            "Door", "HeadraceDoor", "HeadraceSink", "TrajectorySink", "TrinityDoor", "TrinitySink",
        ),
        "headrace_integrations.shadow.runner": ("CopyCounts", "TrainingRunner"),
        "headrace_integrations.shadow.selection": (
            "ExplicitMarkingStrategy", "SamplingRateStrategy", "SelectionStrategy", "ServedRequest", "TrainingCopy",
            "WriteRefused", "mark", "read_only",
        ),
    }  # fmt: skip
    __getattr__, __dir__ = lazy_exports(__name__, names)

__all__ = [
    "CopyCounts", "Door", "ExplicitMarkingStrategy", "HeadraceDoor", "HeadraceSink", "SamplingRateStrategy",
    "SelectionStrategy", "ServedRequest", "TrainingCopy", "TrainingRunner", "TrajectorySink", "TrinityDoor",
    "TrinitySink", "WriteRefused", "mark", "read_only",
]  # fmt: skip
