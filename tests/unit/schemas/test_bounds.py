"""Tests of the limits of event fields: text that cannot be stored and numbers out of range are refused.

The fields are found in the published examples and in the models, so new fields are tested without a new test. No
producer can build a list that its event refuses: each limit of an event is at least that of its producer. A new list of
an event fails here until its producer's limit is declared.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

import headrace_schemas.events
from headrace_collector.closing import _TOOLS_MAX
from headrace_collector.handlers import SEQUENCES_MAX
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_inference.announce import _VERSIONS_MAX
from headrace_registry.catalog import ALIASES_MAX
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.settings import RegistrySettings
from headrace_registry.versions.routing import WITHDRAWN_MAX
from headrace_runtime.kafka.dead_letters import _HEADERS_MAX
from headrace_schemas import EVENTS, Event, Experience, Feedback, Reward, Trajectory, Turn
from headrace_schemas.events.chat import LOGIT_BIAS_MAX
from headrace_schemas.events.checkpoint import LISTED_MAX, STATISTICS_MAX, TURNS_MAX
from headrace_schemas.events.turn import STOP_IDS_MAX
from headrace_schemas.values import bounds
from headrace_schemas.values.base import Model
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, JsonObject, check_json, merge_contexts
from headrace_schemas.values.errors import InvalidEvent
from headrace_scorer.ledger import CORRECTIONS_MAX
from headrace_scorer.reward_policy import PARTS_MAX
from headrace_trainer.batches.summary import VALUES_MAX
from headrace_trainer.lineage.lineage import OUTCOMES_PER_SAVE
from headrace_trainer.settings import MemorySettings
from tests.support.hostile_json import event_examples

EXAMPLES = [(topic, name) for topic in EVENTS for name in event_examples(topic)]
FREE: TypeAdapter[dict[str, Any]] = TypeAdapter(JsonObject)
Place = tuple[str | int, ...]
UNSTORABLE = ("a\0b", "\ud83d", "\udc00 end")
WRONG_NUMBERS = (1.8e308, -1.7e308, 10**400, -(2**63) - 1, 1e39)
DIAGNOSTIC = {"metrics", "statistics", "max_abs_delta", "parent_max_abs_delta", "ttl_s"}
"""Fields with measured figures that no other event is computed from: they only have to be finite."""


def _paths(value: Any, path: Place = ()) -> Iterator[Place]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _paths(inner, (*path, name))


def _at(value: Any, path: Place) -> Any:
    for name in path:
        value = value[name]
    return value


def _with(value: Any, path: Place, new: Any) -> Any:
    changed = copy.deepcopy(value)
    if not path:
        return new
    _at(changed, path[:-1])[path[-1]] = new
    return changed


def _read(model: type[Event], data: object) -> Event | None:
    """Return the event, or None if it is refused by name. Any other exception fails the test."""
    text = json.dumps(data).replace("Infinity", "1e999")
    try:
        return model.from_json(text.encode("utf-8", "surrogatepass"))
    except InvalidEvent:
        return None


def _survives(event: Event) -> bool:
    """Return whether a consumer gets an equal event and PostgreSQL can store its text."""
    again = type(event).from_json(event.to_json())
    return again.to_json() == event.to_json() and b"\\u0000" not in event.to_json()


@pytest.mark.parametrize(("topic", "name"), EXAMPLES)
def test_text_that_cannot_be_stored_is_refused_at_every_place_of_every_event(topic: str, name: str) -> None:
    model, data = EVENTS[topic], event_examples(topic)[name]
    for field_path in _paths(data):
        for text in UNSTORABLE:
            if isinstance(_at(data, field_path), str):
                refused = _read(model, _with(data, field_path, text)) is None
                assert refused or _is_sampled(model, field_path), (field_path, text)
            if isinstance(_at(data, field_path), dict) and _read(model, {**data, "x": {"y": 1}}) is not None:
                event = _read(model, _with(data, field_path, {**_at(data, field_path), text: 1}))
                assert event is None or _survives(event), (field_path, text)  # an unknown field is left out


def _is_sampled(model: type[Event], path: Place) -> bool:
    """Return whether the field at `path` holds text that a model may have sampled."""
    fields = {"content", "text", "reasoning_content", "arguments"}
    return (
        model in (Turn, Trajectory, Experience) and "token_grammar" not in path and bool(fields.intersection(path[-1:]))
    )


@pytest.mark.parametrize("kind", [Turn, Trajectory, Experience], ids=lambda kind: kind.__name__)
def test_nul_that_a_model_sampled_is_replaced_in_the_records_of_an_older_release(kind: type[Event]) -> None:
    path_count = 0
    for data in event_examples(kind.topic).values():
        for field_path in _paths(data):
            if _is_sampled(kind, field_path) and isinstance(_at(data, field_path), str):
                event = _read(kind, _with(data, field_path, "a\0b"))
                assert event == _read(kind, _with(data, field_path, "a\ufffdb")), field_path
                assert event is not None, field_path
                path_count += 1
    assert path_count > 0


@pytest.mark.parametrize(("topic", "name"), EXAMPLES)
def test_stored_events_of_an_older_release_are_cleaned_at_every_place_of_free_text(topic: str, name: str) -> None:
    model, data = EVENTS[topic], event_examples(topic)[name]
    for field_path in _paths(data):
        if not isinstance(_at(data, field_path), str):
            continue
        refused = _read(model, _with(data, field_path, "a\x01b")) is None  # a pattern, a time, a word of a list
        try:
            event = model.from_stored(json.dumps(_with(data, field_path, "a\0b")).encode())
        except InvalidEvent:
            assert refused, field_path
        else:
            assert _survives(event), field_path


@pytest.mark.parametrize(("topic", "name"), EXAMPLES)
def test_numbers_beyond_their_range_are_refused_at_every_place_of_every_event(topic: str, name: str) -> None:
    model, data = EVENTS[topic], event_examples(topic)[name]
    for field_path in _paths(data):
        before = _at(data, field_path)
        if isinstance(before, bool) or not isinstance(before, int | float) or DIAGNOSTIC & set(map(str, field_path)):
            continue
        for number in WRONG_NUMBERS:
            event = _read(model, _with(data, field_path, number))
            free = "context" in field_path or "parameters" in field_path or "response_format" in field_path
            assert event is None or (free and math.isfinite(number) and _survives(event)), (field_path, number)


@pytest.mark.parametrize(("topic", "name"), EXAMPLES)
def test_times_at_the_ends_of_the_calendar_are_refused_or_read(topic: str, name: str) -> None:
    model, data = EVENTS[topic], event_examples(topic)[name]
    for field in [field for field in data if field == "time" or field.endswith("_at")]:
        for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59Z"):
            event = _read(model, {**data, field: text})
            assert event is None or _survives(event)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
free_json = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=12,
    ),
    max_size=6,
)
planted = st.sampled_from([*UNSTORABLE, math.nan, math.inf, -math.inf, 2**64, -(2**63) - 1, 10**400])


@given(free_json)
def test_free_json_within_the_bounds_is_passed_on_untouched(value: dict[str, Any]) -> None:
    assert FREE.validate_python(value) == value


@given(free_json, planted, st.data())
def test_one_bad_value_anywhere_in_free_json_is_refused(value: dict[str, Any], bad: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([*_paths(value)]))
    target = _at(value, path)
    if isinstance(target, dict):
        changed = _with(value, path, {**target, **({bad: 1} if isinstance(bad, str) else {"x": bad})})
    else:
        changed = _with(value, path, bad)
    with pytest.raises(ValidationError):
        FREE.validate_python(changed)


def _nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels - 2):
        value = [value]
    return {"x": value}


def test_free_json_is_bounded_in_depth_values_and_characters() -> None:
    values, characters = bounds.JSON_VALUES_MAX, bounds.JSON_CHARACTERS_MAX
    at_bound = (_nested(bounds.JSON_DEPTH_MAX), {"x": [0] * (values - 2)}, {"x": "y" * (characters - 1)})
    for value in at_bound:
        check_json(value)
    beyond = (_nested(bounds.JSON_DEPTH_MAX + 1), {"x": [0] * (values - 1)}, {"x": "y" * characters})
    for value in beyond:
        with pytest.raises(ValidationError, match="at most"):
            FREE.validate_python(value)


big = st.sampled_from([1, "y", [0] * 10_000, "y" * 300_000, [[0] * 100] * 100])


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from([f"k{n}" for n in range(90)]), big, max_size=64), max_size=8))
def test_merged_contexts_fit_every_event_and_keep_the_newest(contexts: list[dict[str, Any]]) -> None:
    merged = merge_contexts(contexts)
    assert FREE.validate_python(merged) == merged
    assert len(merged) <= bounds.CONTEXT_KEYS_MAX
    newest: dict[str, Any] = {}
    for context in contexts:
        for name in context:
            newest.pop(name, None)
        newest |= context
    assert [*merged.items()] == [*newest.items()][len(newest) - len(merged) :], "what is left out was given first"
    if contexts and all(not isinstance(value, list | str) for context in contexts for value in context.values()):
        assert len(merged) == min(len(newest), bounds.CONTEXT_KEYS_MAX)


def test_one_context_at_its_bounds_stays_whole_when_it_is_merged() -> None:
    context: dict[str, JsonValue] = {f"k{n}": [0] * (bounds.JSON_VALUES_MAX // 64 - 2) for n in range(64)}
    check_json(context)
    assert merge_contexts([{"older": 1}, context]) == context


def _reward(value: float) -> dict[str, Any]:
    data: dict[str, Any] = event_examples("rewards")["function"]
    return {**data, "outcome": "scored", "value": value, "criteria": {}}


@given(st.floats(-bounds.SCORE_MAX, bounds.SCORE_MAX))
@example(bounds.SCORE_MAX)
@example(-bounds.SCORE_MAX)
@example(1e-320)
def test_scores_within_their_range_are_taken(value: float) -> None:
    assert _read(Reward, _reward(value)) is not None


@given(st.floats(allow_nan=True, allow_infinity=True))
@example(math.nextafter(bounds.SCORE_MAX, math.inf))
def test_scores_beyond_their_range_are_refused(value: float) -> None:
    within = abs(value) <= bounds.SCORE_MAX
    assert (_read(Reward, _reward(value)) is not None) == within


@given(st.lists(st.floats(-bounds.SCORE_MAX, bounds.SCORE_MAX), min_size=1, max_size=64), st.floats(0, 1e6))
def test_what_follows_from_scores_within_their_range_fits_an_experience(scores: list[float], weight: float) -> None:
    assert abs(math.fsum(scores) / len(scores)) <= bounds.SCORE_MAX
    assert sum(abs(score) * weight for score in scores) <= bounds.TOTAL_MAX


def test_events_of_other_producers_have_a_bound_on_their_values() -> None:
    assert all(0 < event.values_max <= 262_144 for event in EVENTS.values())
    assert Feedback.values_max < Trajectory.values_max


def upper_bound(model: type[BaseModel], field: str) -> int:
    """Return the largest value, or the largest length, that a setting or a request field may have."""
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
OUTCOMES = OUTCOMES_PER_SAVE + 2 * QUEUE
"""The outcomes that cause a save, and those of a step and of all that waits in one poll."""
COMPLETIONS = SEQUENCES_MAX + upper_bound(ChatRequest, "n")
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
    "TrainingOutcome.turn_advantages": TURNS_MAX,
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
    "Sampling.logit_bias": LOGIT_BIAS_MAX,
    "LogitShift.logit_bias": LOGIT_BIAS_MAX,
}
"""Largest length that a producer builds. A larger turn becomes a dead letter, so its tokens are isolated."""


def bounded_lists() -> Iterator[tuple[str, int]]:
    """Yield every bounded list and object of every event, with its limit."""
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
