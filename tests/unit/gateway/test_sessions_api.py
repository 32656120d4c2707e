"""Tests of feedback, ends, commits and ingested trajectories over HTTP.

The feedback and commit requests of Trinity-RFT are tested byte by byte as its clients send them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_schemas import Feedback, SessionEnd, Trajectory
from headrace_schemas.rules.ingest import KnownModels, find_objection
from headrace_schemas.values import ids
from tests.support.fake_replica import VERSION
from tests.support.gateway import PARTITIONS, gateway

KEYS = [ids.session_key("default", name) for name in ("run-1", "run-2")]
IDS = [ids.response_id(key) for key in KEYS]


async def test_feedback_on_a_session(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        body = {
            "session_id": "run-1", "value": 1, "source": "user", "task_id": "t", "run_id": 7, "comment": "good",
            "context": {"expected": "42"}, "ends_session": True, "feedback_id": "f-1",
        }  # fmt: skip
        answer = await served.client.post("/v1/feedback", json=body)
        (event,) = served.bus.events(Feedback)
        assert answer.status_code == 202
        assert answer.json() == {"event_ids": [event.event_id], "feedback_id": "f-1"}
        assert event.model_dump(exclude={"time", "session_key", "parts"}, exclude_none=True) == {
            **body,
            "run_id": "7",
            "value": 1.0,
            "tenant": "default",
            "msg_ids": (),
            "withdrawn": False,
            "sessions": 1,
        }
        assert event.session_key == KEYS[0]
        assert (await served.client.post("/v1/feedback", json=body)).json()["event_ids"] == [event.event_id]


async def test_feedback_on_answers_of_several_sessions_reaches_each_with_its_own(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        again = ids.response_id(KEYS[0])
        body = {"msg_ids": [*IDS, again, IDS[0]], "response_id": "not-one-of-ours", "value": -0.5}
        await served.client.post("/v1/feedback", json=body)
        events = served.bus.events(Feedback)
        assert [event.session_key for event in events] == KEYS
        assert [event.msg_ids for event in events] == [(IDS[0], again, "not-one-of-ours"), (IDS[1],)]
        assert {(event.sessions, event.run_sessions) for event in events} == {(2, 2)}
        assert len({event.event_id for event in events}) == 2
        assert len({event.feedback_id for event in events}) == 1


async def test_feedback_for_ids_that_nobody_knows_is_accepted(tmp_path: Path) -> None:
    """Pitfall 27: feedback is accepted first and joined to its turns later."""
    async with gateway(tmp_path) as served:
        for target in ({"msg_ids": ["never-seen"]}, {"session_id": "never-seen"}, {"response_id": IDS[0]}):
            answer = await served.client.post("/v1/feedback", json={**target, "value": 1})
            assert answer.status_code == 202
        assert len(served.bus.events(Feedback)) == 3


async def test_feedback_can_be_withdrawn_or_only_add_facts(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        for fields in ({"withdrawn": True}, {"context": {"expected": "42"}}, {"ends_session": True}, {"task_id": "t"}):
            assert (await served.client.post("/v1/feedback", json={"session_id": "a", **fields})).status_code == 202
        assert [event.value for event in served.bus.events(Feedback)] == [None] * 4


def over(sessions: int) -> list[str]:
    return [ids.response_id(ids.session_key("default", f"s{number}")) for number in range(sessions)]


async def test_sessions_per_feedback_are_bounded(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/feedback", json={"msg_ids": over(65), "value": 1})
        assert answer.status_code == 422
        assert "send at most 64 in one feedback" in answer.json()["error"]["message"]
        answer = await served.client.post("/feedback", json={"msg_ids": over(4000), "reward": 1})
        assert answer.status_code == 422
        assert served.bus.records == []
        assert (await served.client.post("/v1/feedback", json={"msg_ids": over(64), "value": 1})).status_code == 202
        assert len(served.bus.events(Feedback)) == 64


@pytest.mark.parametrize("field", ["comment", "context"])
async def test_copies_of_what_is_said_are_bounded(tmp_path: Path, field: str) -> None:
    value = {"comment": "x" * 4000, "context": {"expected": "x" * 40_000}}[field]
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/feedback", json={"msg_ids": over(30), "value": 1, field: value})
        assert answer.status_code == 413
        assert "bytes, more than the" in answer.json()["error"]["message"]
        answer = await served.client.post("/v1/feedback", json={"msg_ids": over(3), "value": 1, field: value})
        assert answer.status_code == 202


@pytest.mark.parametrize("path", ["/v1/feedback", "/feedback", "/commit"])
async def test_a_request_is_charged_for_what_it_causes(tmp_path: Path, path: str) -> None:
    body = {"/commit": {}, "/feedback": {"msg_ids": over(40), "reward": 1}}.get(path, {"msg_ids": over(40), "value": 1})
    limits = {"requests_per_s": 0.001, "burst": 50}
    async with gateway(tmp_path, limits_per_key=limits) as served:
        statuses = [(await served.client.post(path, json=body)).status_code for _ in range(60)]
        assert statuses[0] in (200, 202)
        assert statuses[-1] == 429
        assert len(served.bus.records) <= 50 * (PARTITIONS if path == "/commit" else 1) + 40


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"value": 1}, 400, "must name the target of the feedback"),
        ({"session_id": "a"}, 400, "feedback is empty"),
        ({"session_id": "a", "value": float("nan")}, 400, "finite"),
        ({"session_id": "a", "value": 1, "withdrawn": True}, 400, "withdrawn"),
        ({"session_id": "a\u0000b", "value": 1}, 400, "session_id"),
        ({"msg_ids": IDS * 2048, "value": 1}, 400, "msg_ids"),
        ({"msg_ids": "abc", "value": 1}, 400, "msg_ids"),
        ([], 400, "object"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_feedback_that_makes_no_sense_is_refused(tmp_path: Path, body: Any, status: int, word: str) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/feedback", content=json.dumps(body))
        assert answer.status_code == status
        assert word in answer.json()["error"]["message"]
        assert served.bus.records == []


async def test_trinitys_feedback_as_agentscope_sends_it(tmp_path: Path) -> None:
    """Replay requests of Trinity-RFT's and AgentScope's clients: string run id, long task id, no key, and unknown
    ids."""
    task = "task-0b0e6a1e-92a4-4d2b-9d4b-3a4f5c6d7e8f"
    async with gateway(tmp_path) as served:
        body = {"msg_ids": [IDS[0], "chatcmpl-unknown"], "reward": 0.5, "task_id": task, "run_id": "0"}
        for _ in range(2):
            answer = await served.client.post(
                "/feedback", content=json.dumps(body), headers={"content-type": "application/json; charset=utf-8"}
            )
            assert (answer.status_code, answer.json()) == (200, {"status": "success"})
        first, second = served.bus.events(Feedback)
        assert (first.value, first.task_id, first.run_id, first.ends_session) == (0.5, task, "0", False)
        assert first.msg_ids == (IDS[0], "chatcmpl-unknown")
        assert first.session_key == KEYS[0]
        assert first.event_id != second.event_id, "a value that comes back must be able to win again"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"msg_ids": [IDS[0]], "reward": 1, "task_id": None, "run_id": None}, 200),
        ({"msg_ids": [IDS[0]], "reward": 1, "task_id": "ab12cd", "run_id": 0}, 200),
        ({"msg_ids": [], "reward": 1}, 200),
        ({"msg_ids": [IDS[0]]}, 400),
        ({"reward": 1}, 400),
        ({"msg_ids": [IDS[0]], "reward": "NaN"}, 400),
        ({"msg_ids": [IDS[0]], "reward": None}, 400),
    ],
)
async def test_trinitys_feedback_at_its_edges(tmp_path: Path, body: dict[str, Any], status: int) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/feedback", json=body)
        assert answer.status_code == status
        assert isinstance(answer.json(), dict)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"task_id":null,"run_id":null,"time_threshold":null}'])
async def test_trinitys_commit_reaches_every_partition(tmp_path: Path, body: bytes) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/commit", content=body)
        assert (answer.status_code, answer.json()) == (200, {"status": "success"})
        ends = served.bus.events(SessionEnd)
        assert [end.partition for end in ends] == list(range(PARTITIONS))
        assert {(end.scope, end.reason, end.tenant, end.before) for end in ends} == {
            ("tenant", "commit", "default", None)
        }


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/commit", {"task_id": "t"}, "task_id"), ("/commit", {"run_id": "1"}, "run_id"),
        ("/commit", {"time_treshold": 1}, "time_treshold"), ("/commit", {"force": True}, "force"),
        ("/feedback", {"msg_ids": ["a"], "reward": 1, "rewards": 2}, "rewards"),
        ("/feedback", {"msg_ids": ["a"], "reward": 1, "session_id": "s"}, "session_id"),
    ],
)  # fmt: skip
async def test_fields_that_trinitys_clients_do_not_send_are_refused_by_name(
    tmp_path: Path, path: str, body: dict[str, object], field: str
) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post(path, json=body)
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
        assert served.bus.records == []


@pytest.mark.parametrize("threshold", [1767225600, 1767225600000, "2026-01-01T00:00:00", "2026-01-01T01:00:00+01:00"])
async def test_a_commit_may_hold_back_what_is_newer(tmp_path: Path, threshold: float | str) -> None:
    async with gateway(tmp_path) as served:
        await served.client.post("/commit", json={"time_threshold": threshold})
        before = served.bus.events(SessionEnd)[0].before
        assert before
        assert before.isoformat() == "2026-01-01T00:00:00+00:00"
        assert (await served.client.post("/commit", json={"time_threshold": "soon"})).status_code == 400
        assert (await served.client.post("/commit", json={"time_threshold": 1e300})).status_code == 400


async def test_a_session_is_ended_under_any_name(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/sessions/team%2Frun%201/end")
        (event,) = served.bus.events(SessionEnd)
        assert answer.status_code == 202
        assert answer.json() == {"event_ids": [event.event_id], "session_id": "team/run 1"}
        assert (event.scope, event.reason, event.session_id) == ("session", "end_call", "team/run 1")
        assert event.session_key == ids.session_key("default", "team/run 1")


def trajectory(**fields: Any) -> dict[str, Any]:
    span = {"start": 3, "logprobs": [-0.5, -0.25], "turn_id": "mine-1", "version": VERSION, "finish_reason": "stop"}
    return {
        "trajectory_id": "ours-7",
        "session_id": "run-1",
        "model": "tiny",
        "branches": [{"token_ids": [1, 2, 3, 4, 5], "spans": [span]}],
        "started_at": "2026-01-01T00:00:00Z",
        **fields,
    }


async def test_another_runtimes_trajectory_is_ingested(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/trajectories", json=trajectory(context={"expected": "42"}))
        assert answer.status_code == 202
        (event,) = served.bus.events(Trajectory)
        assert answer.json() == {"event_ids": [event.event_id], "trajectory_id": "ours-7"}
        assert (event.session_key, event.tenant, event.end_reason) == (KEYS[0], "default", "ingest")
        assert event.branches[0].loss_mask == (0, 0, 0, 1, 1)


def answer_of(version: str, **fields: Any) -> dict[str, Any]:
    span = {"start": 3, "logprobs": [0, 0], "turn_id": "mine-1", "version": version, **fields}
    return trajectory(branches=[{"token_ids": [1, 2, 3, 4, 5], "spans": [span]}])


async def test_answers_without_logprobs_are_ingested(tmp_path: Path) -> None:
    """The version of an external server may be unknown, but a version of a model that is served here must exist."""
    elsewhere = "elsewhere@0123456789ab"
    models = KnownModels({"tiny": {VERSION}})
    async with gateway(tmp_path) as served:
        for fields in (
            answer_of(elsewhere, no_logprobs="foreign"),
            answer_of(VERSION, no_logprobs="truncated_sampling"),
            answer_of(elsewhere, no_logprobs="truncated_sampling"),
        ):
            answer = await served.client.post("/v1/trajectories", json=fields)
            assert answer.status_code == 202, answer.text
        refused = await served.client.post(
            "/v1/trajectories", json=answer_of(VERSION, no_logprobs="foreign", logprobs=[-0.5, 0])
        )
        assert (refused.status_code, "must be 0" in refused.text) == (422, True), refused.text
        objections = [find_objection(event, models) for event in served.bus.events(Trajectory)]
    assert [objection and objection.code for objection in objections] == [None, None, "unknown_version"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"branches": []}, 422, "branches"),
        ({"branches": [{"token_ids": [1, 2]}]}, 422, "branches.0.spans"),
        ({"branches": [{"token_ids": [1], "spans": [{"start": 0, "turn_id": "a", "version": VERSION}]}]}, 422, None),
        ({"trajectory_id": None}, 422, "trajectory_id"),
        ({"trajectory_id": "a\u0000b"}, 422, "trajectory_id"),
        ({"session_key": KEYS[1]}, 422, "session_key"),
        ({"tenant": "other"}, 403, "tenant"),
        ({"rewardd": 1}, 422, "rewardd"),
        ({"model": "not a name"}, 422, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_trajectory_that_cannot_be_trained_is_refused(
    tmp_path: Path, change: dict[str, Any], status: int, param: str | None
) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/trajectories", json=trajectory(**change))
        assert answer.status_code == status, answer.text
        if param:
            assert answer.json()["error"]["param"] == param
        assert served.bus.records == []
        assert (await served.client.post("/v1/trajectories", content=b"{")).status_code == 400
