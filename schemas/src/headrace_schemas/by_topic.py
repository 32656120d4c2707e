"""The event class of each topic."""

from __future__ import annotations

from headrace_schemas.base import Event
from headrace_schemas.events.checkpoint import Checkpoint, TrainingMetrics
from headrace_schemas.events.dead_letter import DeadLetter
from headrace_schemas.events.dead_letter_decision import DeadLetterDecision
from headrace_schemas.events.experience import Experience
from headrace_schemas.events.feedback import Feedback, SessionEnd
from headrace_schemas.events.model_event import ModelEvent
from headrace_schemas.events.reward import Reward
from headrace_schemas.events.routing import Replica, Routing
from headrace_schemas.events.trajectory import Trajectory
from headrace_schemas.events.turn import Turn

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
"""Event class by topic. Each topic has exactly one."""
