"""Static members of a group, which keep their assignment over a restart (KIP-345).

The group state machine under any order of requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, Phase
from headrace_broker.group_state import restore, serialize
from headrace_broker.protocol.groups import (
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tests.unit.broker.group_clients import BOTH, RANGE, Clients


class TestStaticMembers:
    def _two(self, clients: Clients) -> tuple[str, str]:
        a, b = clients.join(instance="a"), clients.join(instance="b")
        clients.join(a, instance="a")
        clients.sync(b)
        clients.sync(a, {a: b"1", b: b"2"})
        return a, b

    def test_coming_back_under_a_new_id_keeps_the_assignment(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.group.changed = False
        again = clients.join(instance="b")
        assert clients.phase() is Phase.STABLE
        assert clients.group.changed, "its new id is saved"
        assert clients.joined[again] == JoinGroupResponse(0, Code.NONE, 2, "range", a, again, ())
        clients.sync(again)
        assert clients.synced[again].assignment == b"2"
        assert clients.heartbeat(b) is Code.UNKNOWN_MEMBER_ID
        assert clients.heartbeat(a) is Code.NONE

    def test_a_leader_that_comes_back_does_not_assign_anew(self, clients: Clients) -> None:
        a, _ = self._two(clients)
        again = clients.join(instance="a")
        assert clients.joined[again].leader == a != again
        assert clients.group.leader == again

    def test_coming_back_with_another_subscription_rebalances(self, clients: Clients) -> None:
        self._two(clients)
        again = clients.join(instance="b", protocols=(Protocol("range", b"other topics"),))
        assert clients.phase() is Phase.PREPARING
        assert again not in clients.joined

    def test_coming_back_during_a_rebalance_joins_it(self, clients: Clients) -> None:
        self._two(clients)
        clients.join(instance="c")
        again = clients.join(instance="b")
        assert clients.phase() is Phase.PREPARING
        assert again not in clients.joined

    def test_what_the_old_id_waits_for_is_answered_as_fenced(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.join(b, instance="b", protocols=(Protocol("range", b"other topics"),))
        clients.joined.pop(b)
        clients.join(instance="b")
        assert clients.joined[b] == JoinGroupResponse(0, Code.FENCED_INSTANCE_ID, -1, "", "", b, ())
        clients.join(a, instance="a")
        clients.sync(a_follower := next(m for m in clients.group.members if m != clients.group.leader))
        clients.join(instance="b" if a_follower != a else "a")
        assert clients.synced[a_follower] == SyncGroupResponse(0, Code.FENCED_INSTANCE_ID, b"")

    def test_a_sync_names_the_right_instance(self, clients: Clients) -> None:
        _, b = self._two(clients)
        clients.synced.clear()
        request = SyncGroupRequest("g", 2, b, "b", ())
        clients.group.sync(request, partial(clients.synced.__setitem__, b), clients.now)
        assert clients.synced[b].assignment == b"2"
        with pytest.raises(Rejected) as caught:
            clients.group.sync(request._replace(group_instance_id="a"), lambda _: None, clients.now)
        assert caught.value.code is Code.FENCED_INSTANCE_ID

    def test_one_that_comes_late_waits_for_the_others_that_are_late(self, clients: Clients) -> None:
        a, b = self._two(clients)
        c = clients.join(instance="c", session_s=300)
        clients.group.leave(c, clients.now)
        for member in clients.group.members.values():
            member.expires_s = clients.now + 300
        clients.pass_time(20.1)
        clients.join(b, instance="b", session_s=300)
        clients.pass_time(19)
        assert clients.phase() is Phase.PREPARING
        clients.join(a, instance="a")
        assert clients.phase() is Phase.COMPLETING
        assert len(clients.joined[clients.group.leader].members) == 2

    def test_an_id_with_the_wrong_instance_is_fenced(self, clients: Clients) -> None:
        a, _ = self._two(clients)
        with pytest.raises(Rejected) as caught:
            clients.join(a, instance="b")
        assert caught.value.code is Code.FENCED_INSTANCE_ID

    def test_late_ones_keep_their_place_until_their_session_ends(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.group.leave(a, clients.now)
        for _ in range(3):
            clients.pass_time(8)
            clients.group.members[b].expires_s = clients.now + 10
        assert clients.phase() is Phase.PREPARING
        assert list(clients.group.members) == [b]
        clients.pass_time(11)
        assert clients.phase() is Phase.EMPTY


class GroupMachine(RuleBasedStateMachine):
    """Any order of requests: every request is answered, and a stable group agrees with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.clients = Clients(Group("g", members_max=4))
        self.waiting: dict[str, float] = {}

    def _try(self, request: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return request(*arguments, **options)
        except Rejected:
            return None

    @rule(instance=st.none() | st.sampled_from(["i", "j"]), protocols=st.sampled_from([RANGE, BOTH]))
    def join(self, instance: str | None, protocols: tuple[Protocol, ...]) -> None:
        self._try(self.clients.join, instance=instance, protocols=protocols)

    @precondition(lambda self: self.clients.group.members)
    @rule(data=st.data(), protocols=st.sampled_from([RANGE, BOTH]))
    def rejoin(self, data: st.DataObject, protocols: tuple[Protocol, ...]) -> None:
        member = data.draw(st.sampled_from(sorted(self.clients.group.members)))
        instance = self.clients.group.members[member].instance_id
        self._try(self.clients.join, member, instance=instance, protocols=protocols)

    @precondition(lambda self: self.clients.joined)
    @rule(data=st.data(), action=st.sampled_from(["sync", "heartbeat", "leave"]))
    def act(self, data: st.DataObject, action: str) -> None:
        member = data.draw(st.sampled_from(sorted(self.clients.joined)))
        if action == "sync":
            everybody = {m: m.encode() for m in self.clients.group.members}
            leads = member == self.clients.group.leader
            self._try(self.clients.sync, member, everybody if leads else None)
        elif action == "heartbeat":
            self.clients.heartbeat(member)
        else:
            self._try(self.clients.group.leave, member, self.clients.now)

    @rule(seconds=st.sampled_from([1.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.clients.pass_time(seconds)

    @invariant()
    def nobody_waits_longer_than_a_rebalance(self) -> None:
        group, now = self.clients.group, self.clients.now
        for member in group.members.values():
            if member.joining or member.syncing:
                assert group.phase in (Phase.PREPARING, Phase.COMPLETING)
                assert now <= group.rebalance_ends_s

    @invariant()
    def phases_are_what_they_say(self) -> None:
        group = self.clients.group
        assert bool(group.members) == (group.phase is not Phase.EMPTY)
        assert len(group.members) <= 4
        assert all(key == member.id for key, member in group.members.items())
        if group.phase in (Phase.COMPLETING, Phase.STABLE):
            assert group.leader in group.members
            assert all(group.protocol in {p.name for p in m.protocols} for m in group.members.values())
        if group.phase is Phase.STABLE:
            copy = Group("g")
            restore(copy, serialize(group), now_s=0)
            assert serialize(copy) == serialize(group)
            members = [replace(m, expires_s=0.0, joining=None, syncing=None) for m in group.members.values()]
            assert [replace(m, expires_s=0.0) for m in copy.members.values()] == members


GroupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = GroupMachine.TestCase
