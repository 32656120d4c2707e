"""Tests of sessions in a rollout: arms, stickiness, explicitly named versions, withdrawn versions, and isolation.

Similar names are different sessions, and an API key that is bound to a session reaches no other session.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.routing.placement import Upstream
from headrace_gateway.settings import KeySettings
from headrace_runtime.kafka.wire import Received, Record
from headrace_schemas import Feedback, SessionEnd
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.events.turn import Purpose
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from tests.support import hostile_json
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway
from tests.support.presence import draw_seed
from tests.unit.gateway.test_placement import V1, V2, Rig


def split(share: str = "1/2", **changes: Any) -> TrafficSplit:
    arm = Arm(rollout_id="rollout-1", version=V2, slot=0, share=share)
    return TrafficSplit.model_validate({"unit": "session", "salt": "s", "slots": 1, "arms": (arm,)} | changes)


class RolloutRig(Rig):
    """Two versions on one replica; V1 is the champion."""

    def __init__(self) -> None:
        super().__init__(a=(V1, V2))
        self.revision = 0

    def route_share(self, share: str | None, **changes: Any) -> None:
        self.revision += 1
        traffic_split = split(share) if share else None
        self.route(V1, self.revision, split=traffic_split, **changes)

    def assign(self, call: ChatCall) -> Upstream:
        upstream = self.placement.assign(call)
        assert upstream is not None
        return upstream

    def call_with_identity(self, session: str, **identity: Any) -> ChatCall:
        call = self.call(session)
        return dataclasses.replace(call, identity=dataclasses.replace(call.identity, **identity))


def test_a_session_is_drawn_by_the_rule_that_the_registry_has_too() -> None:
    rig = RolloutRig()
    rig.route_share("1/10")
    arms = set()
    for number in range(200):
        call = rig.call(f"run-{number}")
        upstream = rig.assign(call)
        assert (upstream.version, upstream.assignment) == assign_unit(split("1/10"), V1, call.identity.session_key)
        assert upstream.assignment is not None
        arms.add(upstream.assignment.arm)
    assert arms == {"candidate", "control", "rest"}


def test_a_gateway_that_starts_again_assigns_as_before() -> None:
    before, after = RolloutRig(), RolloutRig()
    for rig in (before, after):
        rig.route_share("1/4")
    for number in range(50):
        first, second = (rig.assign(rig.call(f"run-{number}")) for rig in (before, after))
        assert (first.version, first.assignment) == (second.version, second.assignment)


def test_a_session_that_had_begun_before_is_no_part_of_it() -> None:
    rig = RolloutRig()
    rig.route_share(None)
    calls = [rig.call(f"run-{number}") for number in range(20)]
    for call in calls:
        rig.assign(call)
    rig.route_share("1/2")
    assert {(rig.assign(call).version, rig.assign(call).assignment) for call in calls} == {(V1, None)}


def test_a_session_stays_in_its_arm_while_the_share_grows() -> None:
    rig = RolloutRig()
    rig.route_share("1/100")
    calls = [rig.call(f"run-{number}") for number in range(100)]
    before = [rig.assign(call) for call in calls]
    rig.route_share("1/2")
    after = [rig.assign(call) for call in calls]
    assert [(upstream.version, upstream.assignment) for upstream in before] == [
        (upstream.version, upstream.assignment) for upstream in after
    ]


@pytest.mark.parametrize("withdrawn", [True, False])
def test_sessions_of_a_version_that_is_out_move_at_their_next_turn(withdrawn: bool) -> None:
    """The version is either withdrawn, or on hold and no longer served."""
    rig = RolloutRig()
    rig.route_share("1/2")
    calls = [call for call in map(rig.call, map(str, range(40))) if rig.assign(call).version == V2]
    assert calls
    rig.route_share(None, serve=(V1,), withdrawn=(V2,) if withdrawn else ())
    assert {(rig.assign(call).version, rig.assign(call).assignment) for call in calls} == {(V1, None)}


def test_after_a_promotion_sessions_keep_their_version_and_no_arm() -> None:
    rig = RolloutRig()
    rig.route_share("1/2")
    calls = [rig.call(f"run-{number}") for number in range(30)]
    before = [rig.assign(call).version for call in calls]
    rig.revision += 1
    rig.route(V2, rig.revision)
    after = [rig.assign(call) for call in calls]
    assert [upstream.version for upstream in after] == before
    assert {upstream.assignment for upstream in after} == {None}


def test_who_names_a_version_or_evaluates_is_no_part_of_it() -> None:
    rig = RolloutRig()
    rig.route_share("1/2", aliases={"champion": V1, "canary": V2})
    named = [rig.assign(rig.call(str(number), model=V2)) for number in range(20)]
    aliased = [rig.assign(rig.call(str(number), model="tiny:canary")) for number in range(20)]
    purpose: Purpose = "eval"
    evaluated = [rig.assign(rig.call_with_identity(f"eval-{number}", purpose=purpose)) for number in range(20)]
    assert {upstream.version for upstream in named + aliased} == {V2}
    assert {upstream.version for upstream in evaluated} == {V1}
    assert {upstream.assignment for upstream in named + aliased + evaluated} == {None}


def test_all_sessions_of_a_user_are_in_one_arm() -> None:
    rig = RolloutRig()
    rig.revision += 1
    rig.route(V1, rig.revision, split=split("1/2", unit="user"))
    for user in range(20):
        key = ids.session_key("default", f"user:{user}")
        versions_and_units = {
            (upstream.version, upstream.assignment.unit if upstream.assignment else None)
            for upstream in (rig.assign(rig.call_with_identity(f"{user}-{run}", user_key=key)) for run in range(5))
        }
        assert versions_and_units == {(assign_unit(split(), V1, key)[0], key)}
    assignment = rig.assign(rig.call("alone")).assignment
    assert assignment is not None
    assert assignment.unit == ids.session_key("default", "alone"), "whose calls name nobody is a user of its own"


def test_an_arm_is_kept_where_no_replica_has_its_version() -> None:
    """Arms are compared as assigned, so that failures to load the candidate count against the candidate."""
    rig = RolloutRig()
    rig.route_share("1/2")
    rig.beat("a", V1)
    upstreams = [rig.assign(rig.call(f"run-{number}")) for number in range(20)]
    assert {upstream.version for upstream in upstreams} == {V1}
    assert "candidate" in {upstream.assignment.arm for upstream in upstreams if upstream.assignment}


async def test_each_turn_says_what_its_unit_was_drawn_into(tmp_path: Path) -> None:
    async with FakeReplica().running() as replica, gateway(tmp_path, replica) as server:
        old = replica.versions[0]
        new = "tiny@" + "9" * 16
        arm = Arm(rollout_id="rollout-1", version=new, slot=0, share="1/2")
        traffic_split = TrafficSplit(unit="user", salt="s", slots=1, arms=(arm,))
        server.route(old, serve=(old, new), revision=2, split=traffic_split)
        user_fields: list[dict[str, Any]] = [
            {"user": "ada"},
            {"metadata": {"user_id": "ada"}},
            {"safety_identifier": "ada"},
        ]
        for run, fields in enumerate(user_fields):
            answer = await server.chat(headers={"X-Session-Id": f"run-{run}"}, **fields)
            assert answer.status_code == 200
        streamed = await server.chat(headers={"X-Session-Id": "run-4", "X-User-Id": "ada"}, stream=True)
        assert streamed.status_code == 200
        key = ids.session_key("default", "user:ada")
        expected = assign_unit(traffic_split, old, key)[1]
        assert [turn.assignment for turn in server.turns] == [expected] * 4


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
OWN, OTHER = (ids.response_id(ids.session_key("acme", name)) for name in ("own", "other"))


async def test_two_hundred_lookalike_names_are_two_hundred_sessions_with_their_own_feedback(tmp_path: Path) -> None:
    sessions = hostile_json.draw(random.Random(draw_seed()), 200)
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        for number, session in enumerate(sessions):
            status, answer = await asyncio.to_thread(
                hostile_json.post, served.url, session, "/v1/chat/completions", CHAT
            )
            assert status == 200, (session, answer)
            body = {"session_id": session.name, "value": number}
            plain = hostile_json.NamedSession("ignored", "utf-8 header")
            status, answer = await asyncio.to_thread(hostile_json.post, served.url, plain, "/v1/feedback", body)
            assert status == 202, (session, answer)
            path = f"/v1/sessions/{quote(session.name, safe='')}/end"
            assert (await served.client.post(path)).status_code == 202, session
        turns = {turn.session_id: turn.session_key for turn in served.turns}
        ends = {end.session_id: end.session_key for end in served.bus.events(SessionEnd)}
        values = {event.session_key: event.value for event in served.bus.events(Feedback)}
    names = [session.name for session in sessions]
    assert turns == ends == {name: ids.session_key("default", name) for name in names}
    assert values == {turns[name]: number for number, name in enumerate(names)}


@pytest.mark.parametrize("name", [b"a%00b", b"a%0A", b"a%7F", b"a%C2%85", b"%1B%5B31m"])
async def test_a_path_with_control_characters_is_refused(tmp_path: Path, name: bytes) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.client.post(f"/sessions/{name.decode()}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_value"


async def test_a_header_that_names_two_sessions_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        headers = [("X-Session-Id", "one"), ("X-Session-Id", "two")]
        answer = await served.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "repeated_header")


def bound_key(session_id: str = "own", **fields: Any) -> KeySettings:
    digest = hashlib.sha256("schlüssel".encode()).hexdigest()
    scopes = ("chat", "feedback", "admin")
    return KeySettings(name="bound", sha256=digest, tenant="acme", scopes=scopes, session_id=session_id, **fields)


BEYOND: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("/v1/chat/completions", {"X-Session-Id": "other"}, CHAT),
    ("/v1/chat/completions", {}, {**CHAT, "metadata": {"session_id": "other"}}),
    ("/v1/chat/completions", {"X-Session-Id": "own"}, {**CHAT, "metadata": {"session_id": "other"}}),
    ("/sessions/other/v1/chat/completions", {}, CHAT),
    ("/sessions/other/v1/chat/completions", {"X-Session-Id": "own"}, CHAT),
    ("/v1/responses", {"X-Session-Id": "other"}, {"model": "tiny", "input": "hello"}),
    ("/v1/responses", {}, {"model": "tiny", "input": "hello", "metadata": {"session_id": "other"}}),
    ("/v1/feedback", {}, {"session_id": "other", "value": 1}),
    ("/v1/feedback", {}, {"response_id": OTHER, "value": 1}),
    ("/v1/feedback", {}, {"session_id": "own", "msg_ids": [OWN, OTHER], "value": 1}),
    ("/v1/feedback", {}, {"preference": {"chosen": OWN, "rejected": OTHER}}),
    ("/v1/feedback", {}, {"level": "task", "task_id": "t", "value": 1}),
    ("/v1/feedback", {"X-Session-Id": "other"}, {"session_id": "own", "value": 1}),
    ("/sessions/other/v1/feedback", {}, {"session_id": "own", "value": 1}),
    ("/feedback", {}, {"msg_ids": [OTHER], "reward": 1}),
    ("/commit", {}, {}),
    ("/v1/sessions/other/end", {}, {}),
    ("/v1/sessions/OWN/end", {}, {}),
]


@pytest.mark.parametrize(("path", "headers", "body"), BEYOND)
async def test_a_key_that_is_bound_to_a_session_touches_no_other(
    tmp_path: Path, path: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=(bound_key(),)) as served:
        bound_headers = {**headers, "Authorization": "Bearer schlüssel".encode().decode("latin-1")}
        raw = {name.encode(): value.encode("latin-1") for name, value in bound_headers.items()}
        answer = await served.client.post(path, json=body, headers=raw)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "wrong_session"), answer.text
        assert error["param"] in [name for name, value in body.items() if OTHER in str(value)] or OTHER not in str(body)
        assert served.bus.records == []


async def test_a_key_that_is_bound_to_a_session_serves_that_session(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=(bound_key(),)) as served:
        key = {b"authorization": "Bearer schlüssel".encode()}
        for headers in ({}, {b"x-session-id": b"own"}):
            answer = await served.client.post("/v1/chat/completions", json=CHAT, headers={**key, **headers})
            assert answer.status_code == 200, answer.text
        for body in ({"session_id": "own", "value": 1}, {"response_id": OWN, "value": 1}):
            assert (await served.client.post("/v1/feedback", json=body, headers=key)).status_code == 202
        assert (await served.client.post("/v1/sessions/own/end", headers=key)).status_code == 202
        assert {turn.session_id for turn in served.turns} == {"own"}
        assert {event.session_key for event in served.bus.events(Feedback)} == {ids.session_key("acme", "own")}


async def test_a_response_id_of_another_tenant_leaves_the_version_of_its_session(tmp_path: Path) -> None:
    keys = tuple(
        KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name)
        for name in ("victim", "attacker")
    )
    newer = "tiny@fedcba9876543210"
    replica = FakeReplica(versions=("tiny@0123456789abcdef", newer))
    async with replica.running(), gateway(tmp_path, replica, keys=keys) as served:
        victim = {"authorization": "Bearer victim", "x-session-id": "mine"}
        first = (await served.chat(headers=victim)).json()
        served.route(newer, revision=2, serve=(*replica.versions,))
        for headers in (
            {"authorization": "Bearer attacker"},
            {
                "authorization": "Bearer attacker",
            },
        ):
            body = {"response_id": first["id"], "value": -1, "ends_session": True}
            assert (await served.client.post("/v1/feedback", json=body, headers=headers)).status_code == 202
        assert (await served.client.post("/v1/sessions/mine/end", headers=headers)).status_code == 202
        await served.chat(headers=victim)
        assert [turn.version for turn in served.turns] == ["tiny@0123456789abcdef"] * 2
        assert (await served.client.post("/v1/sessions/mine/end", headers=victim)).status_code == 202
        await served.chat(headers=victim)
        assert served.turns[-1].version == newer


async def test_two_tenants_may_name_their_trajectories_and_feedback_alike(tmp_path: Path) -> None:
    """Events of two tenants have different ids, so neither is dropped as a duplicate."""
    keys = {tenant: f"key-{tenant}" for tenant in ("default", "a", "b", "a/b")}
    settings = [
        KeySettings(name=f"k{at}", sha256=hashlib.sha256(key.encode()).hexdigest(), tenant=tenant, scopes=("admin",))
        for at, (tenant, key) in enumerate(keys.items())
    ]
    span = {"start": 1, "logprobs": [-0.5], "turn_id": "t-1", "version": "tiny@0123456789ab", "finish_reason": "stop"}
    longest = "x" * 512
    async with gateway(tmp_path, keys=settings) as served:
        names: dict[str, list[str]] = {}
        for tenant, key in keys.items():
            headers = {"authorization": f"Bearer {key}"}
            names[tenant] = []
            for name in ("run-1", "run-1", longest):
                body = {
                    "trajectory_id": name,
                    "session_id": "run-1",
                    "model": "tiny",
                    "branches": [{"token_ids": [1, 2], "spans": [span]}],
                    "started_at": "2026-01-01T00:00:00Z",
                }
                answer = await served.client.post("/v1/trajectories", json=body, headers=headers)
                assert answer.status_code == 202, answer.text
                names[tenant].append(answer.json()["trajectory_id"])
            again = {**body, "trajectory_id": names[tenant][0]}
            answer = await served.client.post("/v1/trajectories", json=again, headers=headers)
            assert answer.json()["trajectory_id"] == names[tenant][0]
            feedback_body = {"response_id": OWN, "value": 1, "feedback_id": "f"}
            assert (await served.client.post("/v1/feedback", json=feedback_body, headers=headers)).status_code == 202
        for tenant in ("b", "default"):  # a name that has the prefix of another tenant
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            foreign = {**body, "trajectory_id": names["a"][0]}
            answer = await served.client.post("/v1/trajectories", json=foreign, headers=headers)
            names[tenant].append(answer.json()["trajectory_id"])
        identities = [_identity(event) for event in served.bus.events(Feedback)]
    assert names["default"][:3] == ["run-1", "run-1", longest]
    assert all(of[0] == of[1] and max(map(len, of)) <= 512 for of in names.values())
    assert len({name for of in names.values() for name in of}) == 2 * len(keys) + 2
    assert len(set(identities)) == len(keys)


def _identity(event: Feedback) -> str:
    return Received(event, Envelope.of(event, "test"), Record("feedback", 0, 0, None, None)).identity
