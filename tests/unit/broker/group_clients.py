"""Members of a group, with a clock that the test owns and replies that are collected."""

from __future__ import annotations

from functools import partial

from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, GroupMember, Phase
from headrace_broker.protocol.groups import (
    Assignment,
    JoinGroupRequest,
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)

RANGE = (Protocol("range", b"r"),)
BOTH = (Protocol("sticky", b"s"), Protocol("range", b"r"))


class Clients:
    """Members of one group, each with its newest answers."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.now = 0.0
        self.ids = 0
        self.joined: dict[str, JoinGroupResponse] = {}
        self.synced: dict[str, SyncGroupResponse] = {}

    def join(
        self, member_id: str = "", *, protocols: tuple[Protocol, ...] = RANGE, instance: str | None = None,
        session_s: float = 10, rebalance_s: float = 20,
    ) -> str:  # fmt: skip
        """Send a JoinGroup; a new member learns its id first. Returns the id; the answer comes to `joined`."""
        request = JoinGroupRequest(
            "g", int(session_s * 1000), int(rebalance_s * 1000), member_id, instance, "consumer", protocols
        )
        self.ids += 1
        member = GroupMember(
            member_id or f"m{self.ids}",
            instance,
            "client",
            "/host",
            session_s,
            rebalance_s,
            protocols,
            self.now + session_s,
        )
        try:
            self.group.join(request, member, partial(self.joined.__setitem__, member.id), self.now)
        except Rejected as error:
            if error.code is not Code.MEMBER_ID_REQUIRED:
                raise
            return self.join(member.id, protocols=protocols, session_s=session_s, rebalance_s=rebalance_s)
        return member.id

    def sync(self, member_id: str, assignments: dict[str, bytes] | None = None) -> None:
        assigned = tuple(Assignment(*item) for item in (assignments or {}).items())
        request = SyncGroupRequest("g", self.joined[member_id].generation_id, member_id, None, assigned)
        self.group.sync(request, partial(self.synced.__setitem__, member_id), self.now)

    def heartbeat(self, member_id: str) -> Code:
        try:
            self.group.heartbeat(member_id, self.joined[member_id].generation_id, self.now)
        except Rejected as error:
            return error.code
        return Code.NONE

    def settle(self, *members: str) -> None:
        """All rejoin and sync; each is assigned its own name."""
        for member in members:
            self.join(member)
        leader = self.joined[members[0]].leader
        for member in members:
            self.sync(member, {m: m.encode() for m in members} if member == leader else None)

    def phase(self) -> Phase:
        return self.group.phase

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.group.tick(self.now)
