"""Tests of events and their records.

Rules hold when an event is built and when it is read. Invalid values raise only `InvalidEvent`. Envelopes are
CloudEvents. No change breaks consumers of the released version.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

import headrace
import headrace_schemas
from headrace_schemas import EVENTS, Event, Experience, Feedback, Reward, Trajectory, Turn
from headrace_schemas.events.envelope import SEQUENCE_HEADER, Envelope, parse_record, sequence_of, type_of
from headrace_schemas.generate import JSON_FOLDER, RELEASED_FILE, TOPICS_FILE, breaking_changes, documents
from headrace_schemas.http.replica_api import Resume
from headrace_schemas.lazy import lazy_exports
from headrace_schemas.values.blobs import EVENT_BYTES_MAX, BlobRef
from headrace_schemas.values.errors import InvalidEvent
from tests.support.hostile_json import EXAMPLES, event_examples, kinds_everywhere

ALL = [(topic, name) for topic in EVENTS for name in event_examples(topic)]


def example(name: str) -> dict[str, Any]:
    topic, _, example_name = name.partition("/")
    return event_examples(topic)[example_name]


@pytest.mark.parametrize(("topic", "name"), ALL)
def test_an_example_survives_the_wire(topic: str, name: str) -> None:
    event = EVENTS[topic].from_json(json.dumps(event_examples(topic)[name]).encode())
    again = type(event).from_json(event.to_json())
    assert again == event
    assert again.to_json() == event.to_json()
    assert event.event_id == again.event_id
    assert event.key


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.topic)
def test_every_topic_has_an_example(event: type[Event]) -> None:
    assert event_examples(event.topic)


def test_every_example_belongs_to_a_topic() -> None:
    assert EXAMPLES.keys() == set(EVENTS)


def test_events_on_one_topic_have_distinct_ids() -> None:
    for topic, event in EVENTS.items():
        ids = [event.from_json(json.dumps(data).encode()).event_id for data in event_examples(topic).values()]
        assert len(set(ids)) == len(ids)


def test_readers_let_new_fields_pass_at_every_depth_and_producers_do_not() -> None:
    data = example("turns/tool-call")
    data["from_the_future"] = 1
    data["choices"][0]["message"]["tool_calls"][0]["function"]["from_the_future"] = {}
    assert (
        Turn.from_json(json.dumps(data).encode()).model_dump()
        == Turn.model_validate(example("turns/tool-call")).model_dump()
    )
    with pytest.raises(ValidationError, match="from_the_future"):
        Turn.model_validate(data)


def test_p2_lengths_that_disagree_make_no_turn() -> None:
    changes: list[Callable[[Any], object]] = [
        lambda d: d["choices"][0]["logprobs"].pop(),
        lambda d: d["choices"][0]["token_ids"].append(1),
        lambda d: d["usage"].update(completion_tokens=4),
        lambda d: d["usage"].update(prompt_tokens=6),
        lambda d: d["prompt_token_ids"].append(1),
    ]
    for change in changes:
        data = example("turns/tool-call")
        change(data)
        with pytest.raises(InvalidEvent) as refusal:
            Turn.from_json(json.dumps(data).encode())
        assert refusal.value.reason == "invalid_event"


def test_p6_a_value_exists_exactly_when_the_outcome_is_scored() -> None:
    scored = example("rewards/function")
    assert Reward.model_validate(scored).value == 1.0
    for broken in ({"value": None}, {"outcome": "abstained"}, {"outcome": "failed", "value": 0.0}):
        with pytest.raises(ValidationError, match="a value is required for 'scored'"):
            Reward.model_validate({**scored, **broken})


def test_an_experience_is_trainable_or_says_why_not() -> None:
    ready = example("experiences/ready")
    for broken in ({"reward": None}, {"no_reward": "withdrawn"}, {"branch": None}):
        with pytest.raises(ValidationError):
            Experience.model_validate({**ready, **broken})


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([], "at least 1 item"),
        ([{"start": 3, "logprobs": []}], "is empty"),
        ([{"start": 14, "logprobs": [-1.0, -1.0]}], "reach token 16 of 15"),
        ([{"start": 5, "logprobs": [-1.0] * 3}, {"start": 7, "logprobs": [-1.0]}], "inside the one before"),
    ],
)
def test_spans_lie_inside_their_branch_in_order(spans: list[dict[str, Any]], complaint: str) -> None:
    data = example("trajectories/two-turns")
    common = {"turn_id": "t", "version": "m@0123456789ab"}
    data["branches"][0]["spans"] = [{**common, **span} for span in spans]
    with pytest.raises(ValidationError, match=complaint):
        Trajectory.model_validate(data)


def test_the_loss_mask_covers_sampled_tokens_and_nothing_else() -> None:
    trajectory = Trajectory.model_validate(example("trajectories/two-turns"))
    assert trajectory.branches[0].loss_mask == (0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1)
    assert trajectory.final_answer == "Ada"
    assert len(trajectory.turn_ids) == 3, "two in the branch, one left out"


def test_a_refusal_names_the_field_and_never_the_value() -> None:
    data = example("feedback/withdrawn")
    data["value"] = "my secret"
    data["comment"] = 7
    with pytest.raises(InvalidEvent) as refusal:
        EVENTS["feedback"].from_json(json.dumps(data).encode())
    assert "value" in str(refusal.value)
    assert "comment" in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("junk", [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"{}"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.topic)
def test_junk_is_an_invalid_event_on_every_topic(event: type[Event], junk: bytes) -> None:
    with pytest.raises(InvalidEvent):
        event.from_json(junk)


def test_a_trajectory_names_the_versions_of_what_was_left_out_too() -> None:
    data = example("trajectories/two-turns")
    data["left_out"] = [{"turn_id": "greedy", "reason": "truncated_sampling", "version": "email-agent@" + "c" * 12}]
    data["dialogues"].append({"messages": [{"role": "assistant", "content": "a line with nothing to train"}]})
    trajectory = Trajectory.model_validate(data)
    assert trajectory.versions == ("email-agent@5a1c0ffee0ddba11", "email-agent@cccccccccccc")
    assert trajectory.final_answer == "Ada"


def test_each_branch_has_its_dialogue() -> None:
    data = example("trajectories/two-turns")
    data["branches"] *= 2
    with pytest.raises(ValidationError, match="1 dialogues for 2 branches"):
        Trajectory.model_validate(data)


REWARD = Reward(
    time=datetime(2026, 11, 20, tzinfo=UTC), trajectory_id="t-1", session_key="a" * 16, source="mine", value=0.5
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_round_trip() -> None:
    envelope = Envelope.of(REWARD, "headrace/scorer", TRACE)
    headers = envelope.headers()
    assert dict(headers)["ce_specversion"] == b"1.0"
    assert dict(headers)["ce_time"] == b"2026-11-20T00:00:00Z"
    assert type_of(headers) == "headrace.reward.v1"
    assert Envelope.read(headers, REWARD) == envelope


def test_a_bare_record_gets_the_events_own_id() -> None:
    envelope = Envelope.read([], REWARD)
    assert envelope.id == REWARD.event_id
    assert envelope.source == "unknown"
    assert envelope.traceparent is None


def test_malformed_headers_do_no_harm() -> None:
    envelope = Envelope.read([("traceparent", b"00-junk"), ("ce_id", None), ("ce_source", b"\xff\xfe")], REWARD)
    assert envelope.traceparent is None
    assert envelope.id == REWARD.event_id


def test_places_survive_the_way_and_what_is_none_is_as_if_it_was_not_sent() -> None:
    event = Feedback(time=REWARD.time, feedback_id="f", session_key="a" * 16)
    sent = replace(Envelope.of(event, "test", after={"turns": 12, "trajectories": 0}), sequence=7)
    read = Envelope.read(sent.headers(), event)
    assert (read.after, read.sequence) == ({"turns": 12, "trajectories": 0}, 7)
    for bad in ("turns", "turns=-1", "turns=x,trajectories=2", ""):
        envelope = Envelope.read([("ce_after", bad.encode()), ("ce_sequence", bad.encode())], event)
        assert (envelope.after, envelope.sequence) == (None, None)


REF = BlobRef(uri="file:///x", sha256=hashlib.sha256(b"data").hexdigest(), size=4)


def test_an_event_or_a_reference() -> None:
    assert parse_record("feedback", b"{}", ()) == (Feedback, b"{}")
    assert parse_record("feedback", REF.model_dump_json().encode(), [("ce_dataref", None)]) == (Feedback, REF)


def test_a_reference_to_a_blob_that_is_larger_than_any_event_is_refused() -> None:
    """A record may refer to any blob of the store, such as the weights of a model, and its readers load it whole."""
    for size, is_allowed in ((EVENT_BYTES_MAX, True), (EVENT_BYTES_MAX + 1, False)):
        value = REF.model_copy(update={"size": size}).model_dump_json().encode()
        with contextlib.nullcontext() if is_allowed else pytest.raises(InvalidEvent, match="an event has at most"):
            parse_record("turns", value, [("ce_dataref", b"x")])


@pytest.mark.parametrize(
    ("topic", "value", "headers", "reason"),
    [
        ("nonsense", b"{}", (), "unknown_topic"),
        ("feedback", None, (), "empty_value"),
        ("feedback", b"{}", (("ce_dataref", b"x"),), "invalid_blob_reference"),
    ],
)
def test_what_carries_none_has_a_reason(
    topic: str, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...], reason: str
) -> None:
    with pytest.raises(InvalidEvent) as refusal:
        parse_record(topic, value, headers)
    assert refusal.value.reason == reason


def test_a_reference_matches_its_bytes_alone() -> None:
    assert REF.matches(b"data")
    assert not REF.matches(b"date")
    assert not REF.model_copy(update={"size": 5}).matches(b"data")


@pytest.mark.parametrize(
    ("text", "expected"), [(b"17", 17), (b"", None), (b"-1", None), (None, None), (b"9" * 19, None)]
)
def test_the_first_offset_is_a_number_or_none(text: bytes | None, expected: int | None) -> None:
    assert sequence_of([("other", b"3"), (SEQUENCE_HEADER, text)]) == expected


@pytest.mark.parametrize(("topic", "name"), ALL)
def test_an_event_with_a_value_of_another_type_is_read_or_refused_by_name(topic: str, name: str) -> None:
    kind = EVENTS[topic]
    refused = 0
    for changed in kinds_everywhere(event_examples(topic)[name], kind.model_fields):
        try:
            event = kind.from_json(json.dumps(changed).encode())
        except InvalidEvent:
            refused += 1
        else:
            assert all(isinstance(text, str) for text in (event.key, event.subject, event.event_id)), changed
    assert refused > 20


def test_arrays_travel_packed_and_come_back() -> None:
    resume = Resume.model_validate({"choices": [{"index": 1, "token_ids": [5, 6], "logprobs": [-0.5, -1.25]}]})
    assert '"token_ids":"BQAAAAYAAAA="' in resume.model_dump_json()
    assert Resume.model_validate_json(resume.model_dump_json()) == resume


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [{"index": 0, "token_ids": [5], "logprobs": []}],
        [{"index": 0, "token_ids": [], "logprobs": []}, {"index": 0, "token_ids": [], "logprobs": []}],
    ],
    ids=["empty", "lengths", "twice"],
)
def test_what_does_not_add_up_is_refused(choices: object) -> None:
    with pytest.raises(ValidationError):
        Resume.model_validate({"choices": choices})


@pytest.mark.parametrize("name", documents())
def test_committed_documents_are_what_the_models_generate(name: str) -> None:
    assert (JSON_FOLDER / name).read_text() == documents()[name], "run `make schemas` and commit the result"


@pytest.mark.parametrize(("topic", "name"), ALL)
def test_examples_satisfy_the_json_schema(topic: str, name: str) -> None:
    jsonschema.validate(event_examples(topic)[name], json.loads((JSON_FOLDER / f"{topic}.json").read_text()))


def test_each_event_has_its_topic_and_each_topic_its_event() -> None:
    specs = yaml.safe_load(TOPICS_FILE.read_text())
    assert set(specs) == set(EVENTS)
    for name, spec in specs.items():
        assert "_" not in name
        assert spec["promises"], f"{name} promises nothing"
        assert spec["producer"]
        assert spec["consumers"], f"nobody reads {name}"


def test_topics_keyed_by_session_have_equal_partition_counts() -> None:
    specs = yaml.safe_load(TOPICS_FILE.read_text())
    assert len({spec["partitions"] for spec in specs.values() if spec["key"] == "session_key"}) == 1


@pytest.mark.parametrize("topic", EVENTS)
def test_no_reader_of_the_released_version_breaks(topic: str) -> None:
    released = json.loads(RELEASED_FILE.read_text())[topic]
    current = json.loads((JSON_FOLDER / f"{topic}.json").read_text())
    assert breaking_changes(released, current) == []


def _rename(schema: dict[str, Any]) -> None:
    schema["properties"]["turn"] = schema["properties"].pop("turn_id")


def _tighten(schema: dict[str, Any]) -> None:
    schema["$defs"]["Choice"]["properties"]["index"]["maximum"] = 3


def _widen(schema: dict[str, Any]) -> None:
    schema["properties"]["purpose"]["enum"].append("shadow")


def _require(schema: dict[str, Any]) -> None:
    schema["properties"]["region"] = {"type": "string"}
    schema["required"].append("region")


def _relax(schema: dict[str, Any]) -> None:
    schema["required"].remove("usage")


@pytest.mark.parametrize("change", [_rename, _tighten, _widen, _require, _relax])
def test_a_breaking_change_is_noticed(change: Any) -> None:
    released = json.loads(documents()["turns.json"])
    changed = copy.deepcopy(released)
    change(changed)
    assert breaking_changes(released, changed)


def test_a_new_optional_field_and_new_prose_break_nobody() -> None:
    released = json.loads(documents()["turns.json"])
    changed = copy.deepcopy(released)
    changed["properties"]["region"] = {"type": "string", "default": "eu"}
    changed["properties"]["turn_id"]["description"] = "better words"
    assert breaking_changes(released, changed) == []


PACKAGES = (headrace_schemas, headrace)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_what_its_module_defines(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert dir(package) == sorted(names)
    for name in names:
        attribute = getattr(package, name)
        home = getattr(attribute, "__module__", "headrace_schemas.events.envelope")
        assert attribute is getattr(import_module(home), name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_type_checker_sees_the_same_names(package: object) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(package.__all__)  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error() -> None:
    get, _ = lazy_exports("headrace_schemas", {"headrace_schemas.values.base": ("Event",)})
    with pytest.raises(AttributeError, match="module 'headrace_schemas' has no attribute 'Evnt'"):
        get("Evnt")
    assert not hasattr(headrace_schemas, "Evnt")


def test_one_event_imports_no_other() -> None:
    code = "import sys; from headrace_schemas import Reward; print('headrace_schemas.events.turn' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
