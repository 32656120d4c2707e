"""The group state machine under any order of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_broker.errors import Rejected
from headrace_broker.group import Group, Phase
from headrace_broker.group_state import restore, serialize
from headrace_broker.protocol.groups import (
    Protocol,
)
from tests.unit.broker.group_clients import BOTH, RANGE, Clients


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
