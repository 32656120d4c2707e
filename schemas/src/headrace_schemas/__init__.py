"""Event classes of all topics. Each class is imported on first use, so importing the package is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_schemas.events.chat import (
        FunctionCall,
        FunctionDefinition,
        Grammar,
        Message,
        Sampling,
        TextPart,
        Tool,
        ToolCall,
    )
    from headrace_schemas.events.checkpoint import (
        BatchRecord,
        Checkpoint,
        ModelEvent,
        PartitionRead,
        RestoredOutcome,
        RevertedOutcome,
        RolloutStep,
        TrainingMetrics,
        TrainingOutcome,
    )
    from headrace_schemas.events.dead_letter import DeadLetter, DeadLetterDecision
    from headrace_schemas.events.envelope import EVENTS
    from headrace_schemas.events.feedback import Feedback, Reward, RewardResult, SessionEnd
    from headrace_schemas.events.routing import Arm, LoadedVersion, Probe, Replica, Routing, ServedVersion, TrafficSplit
    from headrace_schemas.events.trajectory import (
        Branch,
        Dialogue,
        Edit,
        Experience,
        LeftOut,
        PreferenceSide,
        RewardPart,
        Span,
        Trajectory,
        TurnReward,
    )
    from headrace_schemas.events.turn import Choice, SubAgent, TokenGrammar, Turn, UnitAssignment, Usage
    from headrace_schemas.values.base import Event
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_schemas.values.base": ("Event",),
            "headrace_schemas.events.envelope": ("EVENTS",),
            "headrace_schemas.events.chat": (
                "FunctionCall",
                "FunctionDefinition",
                "Grammar",
                "Message",
                "Sampling",
                "TextPart",
                "Tool",
                "ToolCall",
            ),
            "headrace_schemas.events.checkpoint": (
                "BatchRecord",
                "Checkpoint",
                "ModelEvent",
                "PartitionRead",
                "RestoredOutcome",
                "RolloutStep",
                "TrainingMetrics",
                "TrainingOutcome",
                "RevertedOutcome",
            ),
            "headrace_schemas.events.dead_letter": ("DeadLetter", "DeadLetterDecision"),
            "headrace_schemas.events.feedback": ("Feedback", "Reward", "RewardResult", "SessionEnd"),
            "headrace_schemas.events.routing": (
                "Arm",
                "LoadedVersion",
                "Probe",
                "Replica",
                "Routing",
                "ServedVersion",
                "TrafficSplit",
            ),
            "headrace_schemas.events.trajectory": (
                "Branch",
                "Dialogue",
                "Edit",
                "Experience",
                "LeftOut",
                "PreferenceSide",
                "RewardPart",
                "Span",
                "Trajectory",
                "TurnReward",
            ),
            "headrace_schemas.events.turn": ("Choice", "SubAgent", "TokenGrammar", "Turn", "UnitAssignment", "Usage"),
        },
    )

__all__ = [
    "EVENTS",
    "Arm",
    "BatchRecord",
    "Branch",
    "Checkpoint",
    "Choice",
    "DeadLetter",
    "DeadLetterDecision",
    "Dialogue",
    "Edit",
    "Event",
    "Experience",
    "Feedback",
    "FunctionCall",
    "FunctionDefinition",
    "Grammar",
    "LeftOut",
    "LoadedVersion",
    "Message",
    "ModelEvent",
    "PartitionRead",
    "PreferenceSide",
    "Probe",
    "Replica",
    "RestoredOutcome",
    "RevertedOutcome",
    "Reward",
    "RewardPart",
    "RewardResult",
    "RolloutStep",
    "Routing",
    "Sampling",
    "ServedVersion",
    "SessionEnd",
    "Span",
    "SubAgent",
    "TextPart",
    "TokenGrammar",
    "Tool",
    "ToolCall",
    "TrafficSplit",
    "TrainingMetrics",
    "TrainingOutcome",
    "Trajectory",
    "Turn",
    "TurnReward",
    "UnitAssignment",
    "Usage",
]
