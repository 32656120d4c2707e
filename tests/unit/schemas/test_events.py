"""Rules of an event are enforced where it is built and where it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import headrace_schemas
from headrace_schemas import EVENTS, Event, Experience, Reward, Trajectory, Turn
from headrace_schemas.values.errors import InvalidEvent

EXAMPLES = Path(headrace_schemas.__file__).parent / "examples"
ALL = sorted(EXAMPLES.glob("*/*.json"))


def example(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text())
    return data


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_survives_the_wire(path: Path) -> None:
    event = EVENTS[path.parent.name].from_json(path.read_bytes())
    again = type(event).from_json(event.to_json())
    assert again == event
    assert again.to_json() == event.to_json()
    assert event.event_id == again.event_id
    assert event.key


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.topic)
def test_every_topic_has_an_example(event: type[Event]) -> None:
    assert list((EXAMPLES / event.topic).glob("*.json"))


def test_every_example_belongs_to_a_topic() -> None:
    assert {path.parent.name for path in ALL} == set(EVENTS)


def test_events_on_one_topic_have_distinct_ids() -> None:
    for topic, event in EVENTS.items():
        ids = [event.from_json(path.read_bytes()).event_id for path in (EXAMPLES / topic).glob("*.json")]
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
