"""No producer can build a list that its event refuses: each bound of an event is at least the producer's own.

A new list of an event fails here until its producer's bound is named.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import headrace_schemas.events
from headrace_collector.settings import CollectorSettings
from headrace_collector.trajectories import _TOOLS_MAX
from headrace_gateway.chat_request import ChatRequest
from headrace_gateway.feedback_request import FeedbackRequest
from headrace_inference.announce import _VERSIONS_MAX
from headrace_registry.catalog.aliases import ALIASES_MAX
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.settings import RegistrySettings
from headrace_registry.versions.routing import WITHDRAWN_MAX
from headrace_runtime.kafka.dead_letters import _HEADERS_MAX
from headrace_schemas import Event
from headrace_schemas.events.allowed_tokens import STOP_IDS_MAX
from headrace_schemas.events.checkpoint import LISTED_MAX
from headrace_schemas.events.model_event import STATISTICS_MAX
from headrace_schemas.values.base import Model
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX
from headrace_scorer.feedback_rewards import CORRECTIONS_MAX
from headrace_scorer.reward_policy import PARTS_MAX
from headrace_trainer.batches.summary import VALUES_MAX
from headrace_trainer.settings import MemorySettings


def upper_bound(model: type[BaseModel], field: str) -> int:
    """Return the largest value, or the largest length, that a setting or a request may have."""
    return next(_bounds_in([*model.model_fields[field].metadata, model.model_fields[field].annotation]))


def _bounds_in(entries: Iterable[Any]) -> Iterator[int]:
    for entry in entries:
        bound = getattr(entry, "le", None) or getattr(entry, "max_length", None)
        if bound is not None:
            yield int(bound)
        yield from _bounds_in([*getattr(entry, "metadata", ()), *get_args(entry)])


SLOTS = upper_bound(RolloutPlan, "slots")
SERVED = upper_bound(RegistrySettings, "served_max") + 2 * (4 + SLOTS)
"""Requested versions, and champion, previous champion, candidate, anchor and rollouts, each with its base."""
QUEUE = upper_bound(MemorySettings, "queue_experiences")
OUTCOMES = upper_bound(MemorySettings, "outcomes") + 2 * QUEUE
"""The outcomes that cause a save, and those of a step and of all that waits in one poll."""
COMPLETIONS = upper_bound(CollectorSettings, "completions_per_session_max") + upper_bound(ChatRequest, "n")
ISOLATED = 0
"""Built for one item, which fails by name when the event cannot be built (`headrace_runtime.storage.isolation`)."""
SPLIT = 0
"""Entries that do not fit are in the next event."""
PRODUCERS = {
    "Checkpoint.metrics": VALUES_MAX,
    "DeadLetter.headers": _HEADERS_MAX,
    "Experience.turn_ids": COMPLETIONS,
    "Experience.parts": PARTS_MAX,
    "Experience.parts_left_out": ISOLATED,
    "Experience.turn_rewards": COMPLETIONS,
    "Experience.edits": CORRECTIONS_MAX,
    "Experience.preferences": 2 * CORRECTIONS_MAX,
    "Feedback.msg_ids": upper_bound(FeedbackRequest, "msg_ids"),
    "Feedback.parts": upper_bound(FeedbackRequest, "parts"),
    "Feedback.context": upper_bound(FeedbackRequest, "context"),
    "ModelEvent.statistics": STATISTICS_MAX,
    "Replica.versions": _VERSIONS_MAX,
    "Replica.grammars": 2,
    "Reward.criteria": ISOLATED,
    "Routing.serve": SERVED,
    "Routing.withdrawn": WITHDRAWN_MAX,
    "Routing.names": ALIASES_MAX + SERVED,
    "Routing.untrained": WITHDRAWN_MAX,
    "TrafficSplit.arms": SLOTS,
    "UnitAssignment.rollouts": SLOTS,
    "TrainingMetrics.metrics": VALUES_MAX,
    "TrainingMetrics.verdicts": OUTCOMES,
    "TrainingMetrics.undone": SPLIT,
    "TrainingMetrics.restored": SPLIT,
    "TrainingMetrics.batches": OUTCOMES,
    "TrainingMetrics.read": OUTCOMES,
    "BatchRecord.read": OUTCOMES,
    "BatchRecord.left_out": LISTED_MAX,
    "TrainingOutcome.left_out": COMPLETIONS,
    "TrainingOutcome.turn_ids": COMPLETIONS,
    "Trajectory.branches": COMPLETIONS,
    "Trajectory.dialogues": COMPLETIONS,
    "Trajectory.tools": _TOOLS_MAX,
    "Trajectory.left_out": COMPLETIONS,
    "Trajectory.context": CONTEXT_KEYS_MAX,
    "Branch.token_ids": ISOLATED,
    "Branch.grammars": COMPLETIONS,
    "Branch.spans": COMPLETIONS,
    "Span.logprobs": ISOLATED,
    "Dialogue.messages": upper_bound(ChatRequest, "messages") + 1,
    "Turn.messages": upper_bound(ChatRequest, "messages"),
    "Turn.tools": upper_bound(ChatRequest, "tools"),
    "Turn.choices": upper_bound(ChatRequest, "n"),
    "Turn.prompt_token_ids": ISOLATED,
    "Choice.token_ids": ISOLATED,
    "Choice.logprobs": ISOLATED,
    "TokenGrammar.stop_ids": STOP_IDS_MAX,
}
"""Largest length that a producer builds. A larger turn becomes a dead letter, so its tokens are isolated."""


def bounded_lists() -> Iterator[tuple[str, int]]:
    """Yield every bounded list and object of every event, with its bound."""
    for module in pkgutil.iter_modules(headrace_schemas.events.__path__):
        importlib.import_module(f"headrace_schemas.events.{module.name}")
    waiting: list[type[Model]] = [kind for kind in _subclasses(Event) if kind.__module__.startswith("headrace_schemas")]
    seen: set[type[Model]] = set()
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            waiting += _models_in(field.annotation)
            if any(kind in str(field.annotation) for kind in ("tuple[", "dict[")):
                bounds = [entry.max_length for entry in field.metadata if hasattr(entry, "max_length")]
                yield from ((f"{model.__name__}.{name}", bound) for bound in bounds)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _models_in(annotation: Any) -> Iterator[type[Model]]:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def test_each_bounded_list_names_its_producer() -> None:
    assert {name for name, _ in bounded_lists()} == set(PRODUCERS)


@pytest.mark.parametrize(("name", "bound"), sorted(set(bounded_lists())))
def test_no_producer_exceeds_the_bound_of_its_event(name: str, bound: int) -> None:
    assert PRODUCERS.get(name, 0) <= bound
