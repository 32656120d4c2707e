"""Sessions in the arms of a rollout: the common rule, stickiness, explicitly named versions, withdrawn versions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.chat_call import ChatCall
from headrace_gateway.placement import Upstream
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.events.turn import Purpose
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway
from tests.unit.gateway.test_placement import V1, V2, Rig


def split(share: str = "1/2", **changes: Any) -> TrafficSplit:
    arm = Arm(rollout_id="rollout-1", version=V2, slot=0, share=share)
    return TrafficSplit.model_validate({"unit": "session", "salt": "s", "slots": 1, "arms": (arm,)} | changes)


class RolloutRig(Rig):
    """A rig with two versions on one replica. V1 is champion."""

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
    """The version is withdrawn, or it is held and no longer served."""
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
    """Arms are compared as they were assigned, so a candidate that cannot be loaded bears that cost itself."""
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
