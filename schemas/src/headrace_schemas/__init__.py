"""The events, one module per topic family."""

from headrace_schemas.base import Event
from headrace_schemas.events.chat import (
    FunctionCall,
    FunctionDefinition,
    Message,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from headrace_schemas.events.checkpoint import (
    BatchRecord,
    Checkpoint,
    Read,
    Restored,
    TrainingMetrics,
    TrainingOutcome,
    Undone,
)
from headrace_schemas.events.dead_letter import DeadLetter
from headrace_schemas.events.dead_letter_decision import DeadLetterDecision
from headrace_schemas.events.experience import Experience, RewardPart
from headrace_schemas.events.feedback import Feedback, SessionEnd
from headrace_schemas.events.model_event import ModelEvent, RolloutStep
from headrace_schemas.events.reward import Reward
from headrace_schemas.events.routing import Arm, LoadedVersion, Probe, Replica, Routing, ServedVersion, TrafficSplit
from headrace_schemas.events.trajectory import Branch, Dialogue, LeftOut, Span, Trajectory
from headrace_schemas.events.turn import Choice, Turn, UnitAssignment, Usage
from headrace_schemas.reward_result import RewardResult

EVENTS: dict[str, type[Event]] = {
    event.topic: event
    for event in (
        Turn,
        Feedback,
        SessionEnd,
        Trajectory,
        Reward,
        Experience,
        Checkpoint,
        Routing,
        Replica,
        ModelEvent,
        TrainingMetrics,
        DeadLetter,
        DeadLetterDecision,
    )
}
"""Topic name to the event that it carries; one event type per topic."""

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
    "Event",
    "Experience",
    "Feedback",
    "FunctionCall",
    "FunctionDefinition",
    "LeftOut",
    "LoadedVersion",
    "Message",
    "ModelEvent",
    "Probe",
    "Read",
    "Replica",
    "Restored",
    "Reward",
    "RewardPart",
    "RewardResult",
    "RolloutStep",
    "Routing",
    "Sampling",
    "ServedVersion",
    "SessionEnd",
    "Span",
    "TextPart",
    "Tool",
    "ToolCall",
    "TrafficSplit",
    "TrainingMetrics",
    "TrainingOutcome",
    "Trajectory",
    "Turn",
    "Undone",
    "UnitAssignment",
    "Usage",
]
