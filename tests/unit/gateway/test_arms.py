"""Sessions in the arms of a rollout: drawn by the common rule, sticky, explicit versions apart, withdrawn ones left."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.chat_call import ChatCall
from headrace_gateway.placement import Upstream
from headrace_schemas import ids
from headrace_schemas.assignment import assign_unit
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.events.turn import Purpose
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway
from tests.unit.gateway.test_placement import V1, V2, Rig


def split(share: str = "1/2", **changes: Any) -> TrafficSplit:
    arm = Arm(rollout_id="rollout-1", version=V2, slot=0, share=share)
    return TrafficSplit.model_validate({"unit": "session", "salt": "s", "slots": 1, "arms": (arm,)} | changes)


class Streets(Rig):
    """Two versions on one replica; V1 is champion."""

    def __init__(self) -> None:
        super().__init__(a=(V1, V2))
        self.revision = 0

    def at(self, share: str | None, **changes: Any) -> None:
        self.revision += 1
        wanted = split(share) if share else None
        self.route(V1, self.revision, split=wanted, **changes)

    def served(self, call: ChatCall) -> Upstream:
        found = self.placement.assign(call)
        assert found is not None
        return found

    def of(self, session: str, **identity: Any) -> ChatCall:
        call = self.call(session)
        return dataclasses.replace(call, identity=dataclasses.replace(call.identity, **identity))


def test_a_session_is_drawn_by_the_rule_that_the_registry_has_too() -> None:
    rig = Streets()
    rig.at("1/10")
    arms = set()
    for number in range(200):
        call = rig.call(f"run-{number}")
        found = rig.served(call)
        assert (found.version, found.assignment) == assign_unit(split("1/10"), V1, call.identity.session_key)
        assert found.assignment is not None
        arms.add(found.assignment.arm)
    assert arms == {"candidate", "control", "rest"}


def test_a_gateway_that_starts_again_assigns_as_before() -> None:
    before, after = Streets(), Streets()
    for rig in (before, after):
        rig.at("1/4")
    for number in range(50):
        first, second = (rig.served(rig.call(f"run-{number}")) for rig in (before, after))
        assert (first.version, first.assignment) == (second.version, second.assignment)


def test_a_session_that_had_begun_before_is_no_part_of_it() -> None:
    rig = Streets()
    rig.at(None)
    calls = [rig.call(f"run-{number}") for number in range(20)]
    for call in calls:
        rig.served(call)
    rig.at("1/2")
    assert {(rig.served(call).version, rig.served(call).assignment) for call in calls} == {(V1, None)}


def test_a_session_stays_in_its_arm_while_the_share_grows() -> None:
    rig = Streets()
    rig.at("1/100")
    calls = [rig.call(f"run-{number}") for number in range(100)]
    before = [rig.served(call) for call in calls]
    rig.at("1/2")
    after = [rig.served(call) for call in calls]
    assert [(one.version, one.assignment) for one in before] == [(one.version, one.assignment) for one in after]


@pytest.mark.parametrize("withdrawn", [True, False])
def test_sessions_of_a_version_that_is_out_move_at_their_next_turn(withdrawn: bool) -> None:
    """Withdrawn, or held: then it is not served any more."""
    rig = Streets()
    rig.at("1/2")
    calls = [call for call in map(rig.call, map(str, range(40))) if rig.served(call).version == V2]
    assert calls
    rig.at(None, serve=(V1,), withdrawn=(V2,) if withdrawn else ())
    assert {(rig.served(call).version, rig.served(call).assignment) for call in calls} == {(V1, None)}


def test_after_a_promotion_sessions_keep_their_version_and_no_arm() -> None:
    rig = Streets()
    rig.at("1/2")
    calls = [rig.call(f"run-{number}") for number in range(30)]
    before = [rig.served(call).version for call in calls]
    rig.revision += 1
    rig.route(V2, rig.revision)
    after = [rig.served(call) for call in calls]
    assert [one.version for one in after] == before
    assert {one.assignment for one in after} == {None}


def test_who_names_a_version_or_evaluates_is_no_part_of_it() -> None:
    rig = Streets()
    rig.at("1/2", aliases={"champion": V1, "canary": V2})
    named = [rig.served(rig.call(str(number), model=V2)) for number in range(20)]
    aliased = [rig.served(rig.call(str(number), model="tiny:canary")) for number in range(20)]
    purpose: Purpose = "eval"
    evaluated = [rig.served(rig.of(f"eval-{number}", purpose=purpose)) for number in range(20)]
    assert {one.version for one in named + aliased} == {V2}
    assert {one.version for one in evaluated} == {V1}
    assert {one.assignment for one in named + aliased + evaluated} == {None}


def test_all_sessions_of_a_user_are_in_one_arm() -> None:
    rig = Streets()
    rig.revision += 1
    rig.route(V1, rig.revision, split=split("1/2", unit="user"))
    for user in range(20):
        key = ids.session_key("default", f"user:{user}")
        found = {
            (one.version, one.assignment.unit if one.assignment else None)
            for one in (rig.served(rig.of(f"{user}-{run}", user_key=key)) for run in range(5))
        }
        assert found == {(assign_unit(split(), V1, key)[0], key)}
    nobody = rig.served(rig.call("alone")).assignment
    assert nobody is not None
    assert nobody.unit == ids.session_key("default", "alone"), "whose calls name nobody is a user of its own"


def test_an_arm_is_kept_where_no_replica_has_its_version() -> None:
    """Arms are compared as they were assigned: what a candidate that cannot be loaded costs is its own."""
    rig = Streets()
    rig.at("1/2")
    rig.beat("a", V1)
    found = [rig.served(rig.call(f"run-{number}")) for number in range(20)]
    assert {one.version for one in found} == {V1}
    assert "candidate" in {one.assignment.arm for one in found if one.assignment}


async def test_each_turn_says_what_its_unit_was_drawn_into(tmp_path: Path) -> None:
    async with FakeReplica().running() as replica, gateway(tmp_path, replica) as made:
        old = replica.versions[0]
        new = "tiny@" + "9" * 16
        arm = Arm(rollout_id="rollout-1", version=new, slot=0, share="1/2")
        wanted = TrafficSplit(unit="user", salt="s", slots=1, arms=(arm,))
        made.route(old, serve=(old, new), revision=2, split=wanted)
        named: list[dict[str, Any]] = [
            {"user": "ada"},
            {"metadata": {"user_id": "ada"}},
            {"safety_identifier": "ada"},
        ]
        for run, fields in enumerate(named):
            answer = await made.chat(headers={"X-Session-Id": f"run-{run}"}, **fields)
            assert answer.status_code == 200
        streamed = await made.chat(headers={"X-Session-Id": "run-4", "X-User-Id": "ada"}, stream=True)
        assert streamed.status_code == 200
        key = ids.session_key("default", "user:ada")
        expected = assign_unit(wanted, old, key)[1]
        assert [turn.assignment for turn in made.turns] == [expected] * 4
