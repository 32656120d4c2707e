"""State machine of one consumer group's rebalance protocol, without I/O, clock or event loop, and the stored form of
its state.

https://cwiki.apache.org/confluence/x/foynAw describes the protocol. Members join, the leader assigns partitions, and
all members get their assignments (sync) and keep them by heartbeats. A response that must wait is passed to the `reply`
function of its request later. The state is stored with the wire codec, so that a restart of the broker causes no
rebalance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.groups import (
    JoinedMember,
    JoinGroupRequest,
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.wire import Bytes, Int32, NullableString, String, WireReader, decode, encode

JoinReply = Callable[[JoinGroupResponse], None]
SyncReply = Callable[[SyncGroupResponse], None]


class Phase(StrEnum):
    """Phase of a group in the protocol. The values are the states in DescribeGroups."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(slots=True)
class GroupMember:
    """Member of a consumer group. `joining` and `syncing` are the reply functions of its waiting JoinGroup and
    SyncGroup requests."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocols: tuple[Protocol, ...]
    expires_s: float
    assignment: bytes = b""
    joining: JoinReply | None = None
    syncing: SyncReply | None = None

    def metadata(self, protocol: str) -> bytes:
        """Return the metadata that the member sent for an assignment protocol."""
        return next((offered.metadata for offered in self.protocols if offered.name == protocol), b"")


@dataclass(slots=True)
class Group:
    """Consumer group. Methods get the current monotonic time in seconds as `now_s`.

    `changed` is set when the group reaches a state that must be stored: it has assignments, or has no members.
    """

    id: str
    members_max: int = 250
    phase: Phase = Phase.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, GroupMember] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)
    """Member ids that were assigned to clients which have not joined with them yet, each with the time at which it
    expires."""
    rebalance_ends_s: float = 0.0
    changed: bool = False
    used_ms: int = 0

    def join(self, request: JoinGroupRequest, member: GroupMember, reply: JoinReply, now_s: float) -> None:
        """Add a new member or let a member rejoin. `member.id` is `request.member_id`, or a new id if that is empty.

        Raises `Rejected`. After MEMBER_ID_REQUIRED the client must join again with `member.id`.
        """
        self._check_protocols(request)
        present = self.members.get(request.member_id)
        if not request.member_id:
            if request.group_instance_id is None:
                self._check_size()
                self.awaited[member.id] = member.expires_s
                raise Rejected(Code.MEMBER_ID_REQUIRED)
            static = self._static(request.group_instance_id)
            if static is not None:
                self._replace(static, member, reply, now_s)
                return
        elif present is None and self.awaited.pop(request.member_id, None) is None:
            raise Rejected(Code.UNKNOWN_MEMBER_ID)
        if present is None:
            self.protocol_type = request.protocol_type
            self._add(member, reply, now_s)
        elif present.instance_id != request.group_instance_id:
            raise Rejected(Code.FENCED_INSTANCE_ID)
        else:
            self._rejoin(present, member, reply, now_s)

    def sync(self, request: SyncGroupRequest, reply: SyncReply, now_s: float) -> None:
        """Store the assignments if the leader sent them, and reply to all members once there are assignments. Raises
        `Rejected`."""
        member = self._member(request.member_id, request.generation_id)
        if request.group_instance_id is not None and member.instance_id != request.group_instance_id:
            raise Rejected(Code.FENCED_INSTANCE_ID)
        if self.phase is Phase.PREPARING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)
        self._extend_session(member, now_s)
        self._reply_sync(member, Code.REBALANCE_IN_PROGRESS, now_s)  # a repeated request replaces the waiting one
        member.syncing = reply
        if self.phase is Phase.COMPLETING and member.id == self.leader:
            assignments = dict(request.assignments)
            for other in self.members.values():
                other.assignment = assignments.get(other.id, b"")
            self.phase = Phase.STABLE
            self.changed = True
        if self.phase is Phase.STABLE:
            for other in self.members.values():
                self._reply_sync(other, Code.NONE, now_s)

    def heartbeat(self, member_id: str, generation: int, now_s: float) -> None:
        """Extend the session of a member.

        Raises:
            Rejected: the member must rejoin because of a rebalance (27), or join as a new member (22, 25).
        """
        member = self._member(member_id, generation)
        self._extend_session(member, now_s)
        if self.phase is Phase.PREPARING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)

    def leave(self, member_id: str, now_s: float) -> None:
        """Remove a member. Raises `Rejected` with error code 25 if the group has no such member."""
        if self.awaited.pop(member_id, None) is not None:
            return
        if member_id not in self.members:
            raise Rejected(Code.UNKNOWN_MEMBER_ID)
        self._remove(member_id, now_s)

    def check_commit(self, member_id: str, generation: int, now_s: float) -> None:
        """Check that a member may commit offsets now. Raises `Rejected` with error code 22, 25 or 27."""
        if generation < 0 and not self.members:
            return  # a client with manual assignment
        member = self._member(member_id, generation)
        self._extend_session(member, now_s)
        if self.phase is Phase.COMPLETING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)

    def check_member(self, member_id: str, generation: int, instance_id: str | None) -> None:
        """Check that `member_id` is a member of the present generation. Raises `Rejected` with error code 22, 25 or
        82."""
        if instance_id is not None:
            static = self._static(instance_id)
            if static is not None and static.id != member_id:
                raise Rejected(Code.FENCED_INSTANCE_ID)
        self._member(member_id, generation)

    def tick(self, now_s: float) -> None:
        """Remove members whose sessions have expired, and end a rebalance that has waited long enough. Must be called a
        few times per second."""
        for member_id in [key for key, until in self.awaited.items() if until < now_s]:
            del self.awaited[member_id]
        silent = [m.id for m in self.members.values() if m.expires_s < now_s and not (m.joining or m.syncing)]
        for member_id in silent:
            self._remove(member_id, now_s)
        if self.phase is Phase.PREPARING and self.rebalance_ends_s < now_s:
            self._complete(now_s)
        elif self.phase is Phase.COMPLETING and self.rebalance_ends_s < now_s:
            for member_id in [m.id for m in self.members.values() if m.syncing is None]:
                self._remove(member_id, now_s)

    def _check_protocols(self, request: JoinGroupRequest) -> None:
        others = [m for m in self.members.values() if m.id != request.member_id]
        offered = {protocol.name for protocol in request.protocols}
        common = offered.intersection(*({p.name for p in other.protocols} for other in others))
        if not request.protocol_type or not common or (others and request.protocol_type != self.protocol_type):
            raise Rejected(Code.INCONSISTENT_GROUP_PROTOCOL)

    def _member(self, member_id: str, generation: int) -> GroupMember:
        member = self.members.get(member_id)
        if member is None:
            raise Rejected(Code.UNKNOWN_MEMBER_ID)
        if generation != self.generation:
            raise Rejected(Code.ILLEGAL_GENERATION)
        return member

    def _static(self, instance_id: str) -> GroupMember | None:
        return next((m for m in self.members.values() if m.instance_id == instance_id), None)

    def _add(self, member: GroupMember, reply: JoinReply, now_s: float) -> None:
        self._check_size()
        self.members[member.id] = member
        member.joining = reply
        self._rebalance(now_s)

    def _check_size(self) -> None:
        if len(self.members) + len(self.awaited) >= self.members_max:
            raise Rejected(Code.GROUP_MAX_SIZE_REACHED, f"the group has {self.members_max} members, which is the limit")

    def _rejoin(self, present: GroupMember, update: GroupMember, reply: JoinReply, now_s: float) -> None:
        if present.joining:  # a repeated request replaces the waiting one
            present.joining(self._refusal(Code.REBALANCE_IN_PROGRESS, present.id))
        is_unchanged = present.protocols == update.protocols
        present.protocols = update.protocols
        present.session_timeout_s = update.session_timeout_s
        present.rebalance_timeout_s = update.rebalance_timeout_s
        present.joining = reply
        self._extend_session(present, now_s)
        is_settled = self.phase is Phase.COMPLETING or (self.phase is Phase.STABLE and present.id != self.leader)
        if is_unchanged and is_settled:  # the member has missed the response, or only checks for changes
            self._reply_join(present, now_s)
        else:
            self._rebalance(now_s)

    def _replace(self, old: GroupMember, new: GroupMember, reply: JoinReply, now_s: float) -> None:
        """Replace a static member that has restarted and rejoins with a new member id.

        It keeps its assignment if its assignment protocols have not changed.
        """
        if old.joining:
            old.joining(self._refusal(Code.FENCED_INSTANCE_ID, old.id))
        if old.syncing:
            old.syncing(SyncGroupResponse(0, Code.FENCED_INSTANCE_ID, b""))
        leader = self.leader
        new.assignment = old.assignment
        new.joining = reply
        self.members = {(new.id if key == old.id else key): m for key, m in self.members.items()}
        self.members[new.id] = new
        if leader == old.id:
            self.leader = new.id
        if self.phase is Phase.STABLE and old.protocols == new.protocols:
            self.changed = True
            new.joining = None
            # With the leader's old id in the response, a replaced leader does not assign partitions again.
            reply(JoinGroupResponse(0, Code.NONE, self.generation, self.protocol, leader, new.id, ()))
        else:
            self._rebalance(now_s)

    def _remove(self, member_id: str, now_s: float) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return  # the removal of another member has completed a rebalance that dropped this one
        if member.joining:
            member.joining(self._refusal(Code.UNKNOWN_MEMBER_ID, member_id))
        if member.syncing:
            member.syncing(SyncGroupResponse(0, Code.UNKNOWN_MEMBER_ID, b""))
        self._rebalance(now_s)

    def _rebalance(self, now_s: float) -> None:
        """Begin a rebalance: all members must join again. Complete it at once if all have joined."""
        if self.phase is not Phase.PREPARING:
            self.phase = Phase.PREPARING
            timeouts = [member.rebalance_timeout_s for member in self.members.values()]
            self.rebalance_ends_s = now_s + max(timeouts, default=0.0)
            for member in self.members.values():
                member.assignment = b""
                self._reply_sync(member, Code.REBALANCE_IN_PROGRESS, now_s)
        if all(member.joining for member in self.members.values()):
            self._complete(now_s)

    def _complete(self, now_s: float) -> None:
        """Complete a rebalance: begin the next generation with the members that have joined, and with static members
        that have not joined yet."""
        self.members = {key: m for key, m in self.members.items() if m.joining or m.instance_id is not None}
        joined = [member for member in self.members.values() if member.joining]
        if self.members and not joined:  # only static members remain, and none has joined: wait for their sessions
            self.rebalance_ends_s = now_s + max(member.rebalance_timeout_s for member in self.members.values())
            return
        self.generation += 1
        if not joined:
            self._end()
            return
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        self.protocol = self._elect_protocol()
        self.phase = Phase.COMPLETING
        self.rebalance_ends_s = now_s + max(member.rebalance_timeout_s for member in self.members.values())
        for member in joined:
            self._reply_join(member, now_s)

    def _end(self) -> None:
        self.phase = Phase.EMPTY
        self.leader = self.protocol = ""
        self.changed = True

    def _elect_protocol(self) -> str:
        """Return the assignment protocol that most members prefer, of those that all members support."""
        common = set.intersection(*({p.name for p in member.protocols} for member in self.members.values()))
        favourites = [next(p.name for p in m.protocols if p.name in common) for m in self.members.values()]
        return max(favourites, key=favourites.count)

    def _reply_join(self, member: GroupMember, now_s: float) -> None:
        assert member.joining is not None
        members = tuple(JoinedMember(m.id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
        listed = members if member.id == self.leader else ()
        reply, member.joining = member.joining, None
        self._extend_session(member, now_s)
        reply(JoinGroupResponse(0, Code.NONE, self.generation, self.protocol, self.leader, member.id, listed))

    def _reply_sync(self, member: GroupMember, code: Code, now_s: float) -> None:
        if member.syncing:
            reply, member.syncing = member.syncing, None
            self._extend_session(member, now_s)
            reply(SyncGroupResponse(0, code, member.assignment))

    def _extend_session(self, member: GroupMember, now_s: float) -> None:
        member.expires_s = now_s + member.session_timeout_s

    @staticmethod
    def _refusal(code: Code, member_id: str) -> JoinGroupResponse:
        return JoinGroupResponse(0, code, -1, "", "", member_id, ())


class SavedMember(NamedTuple):
    """Stored form of a member of a group, with its assignment."""

    id: String
    instance_id: NullableString
    client_id: String
    client_host: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    protocols: tuple[Protocol, ...]
    assignment: Bytes


class SavedGroup(NamedTuple):
    """Stored form of a group that is stable or has no members."""

    generation: Int32
    protocol_type: String
    protocol: String
    leader: String
    members: tuple[SavedMember, ...]


def serialize(group: Group) -> bytes:
    """Encode the state of a group, which must be stable or empty, for storage."""
    members = tuple(
        SavedMember(
            member.id,
            member.instance_id,
            member.client_id,
            member.client_host,
            round(member.session_timeout_s * 1000),
            round(member.rebalance_timeout_s * 1000),
            member.protocols,
            member.assignment,
        )
        for member in group.members.values()
    )
    return bytes(encode(SavedGroup(group.generation, group.protocol_type, group.protocol, group.leader, members)))


def restore(group: Group, state: bytes, now_s: float) -> None:
    """Set the state of a new group from its stored form. The session of each member begins again."""
    if not state:  # the group has offsets but never had members
        return
    stored = decode(SavedGroup, WireReader(state))
    group.generation = stored.generation
    group.protocol_type, group.protocol, group.leader = stored.protocol_type, stored.protocol, stored.leader
    group.members = {
        member.id: GroupMember(
            member.id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.session_timeout_ms / 1000,
            member.rebalance_timeout_ms / 1000,
            member.protocols,
            expires_s=now_s + member.session_timeout_ms / 1000,
            assignment=member.assignment,
        )
        for member in stored.members
    }
    group.phase = Phase.STABLE if group.members else Phase.EMPTY
