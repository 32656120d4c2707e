"""One consumer group: the rebalance protocol as a state machine without I/O, clock or event loop of its own.

https://cwiki.apache.org/confluence/x/foynAw describes the protocol. Members join, the leader assigns, all learn their
assignment (sync), and heartbeats keep it so. Answers that must wait are given through the `reply` of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.groups import (
    JoinedMember,
    JoinGroupRequest,
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)

JoinReply = Callable[[JoinGroupResponse], None]
SyncReply = Callable[[SyncGroupResponse], None]


class Phase(StrEnum):
    """Where a group is in the protocol; the values are what DescribeGroups says."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(slots=True)
class GroupMember:
    """One client of the group. `joining` and `syncing` are requests that wait for an answer."""

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
        return next((offered.metadata for offered in self.protocols if offered.name == protocol), b"")


@dataclass(slots=True)
class Group:
    """Every method takes the time (`now_s`, monotonic) and changes state at once.

    `changed` says that a state worth saving was reached: assignments made, or nobody left.
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
    """Ids given to clients that have not joined with them yet, until when they may."""
    rebalance_ends_s: float = 0.0
    changed: bool = False
    used_ms: int = 0

    def join(self, request: JoinGroupRequest, member: GroupMember, reply: JoinReply, now_s: float) -> None:
        """Take the member in, or back. `member.id` is `request.member_id` or, when that is empty, a new one.

        Raises `Rejected`; for MEMBER_ID_REQUIRED the client is to come again with `member.id`.
        """
        self._check_protocols(request)
        known = self.members.get(request.member_id)
        if not request.member_id:
            if request.group_instance_id is None:
                self._check_size()
                self.awaited[member.id] = member.expires_s
                raise Rejected(Code.MEMBER_ID_REQUIRED)
            static = self._static(request.group_instance_id)
            if static is not None:
                self._replace(static, member, reply, now_s)
                return
        elif known is None and self.awaited.pop(request.member_id, None) is None:
            raise Rejected(Code.UNKNOWN_MEMBER_ID)
        if known is None:
            self.protocol_type = request.protocol_type
            self._add(member, reply, now_s)
        elif known.instance_id != request.group_instance_id:
            raise Rejected(Code.FENCED_INSTANCE_ID)
        else:
            self._rejoin(known, member, reply, now_s)

    def sync(self, request: SyncGroupRequest, reply: SyncReply, now_s: float) -> None:
        """Hand in (the leader) and wait for the assignments. Raises `Rejected`."""
        member = self._checked(request.member_id, request.generation_id)
        if request.group_instance_id is not None and member.instance_id != request.group_instance_id:
            raise Rejected(Code.FENCED_INSTANCE_ID)
        if self.phase is Phase.PREPARING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)
        self._keep(member, now_s)
        self._reply_sync(member, Code.REBALANCE_IN_PROGRESS, now_s)  # asked twice: only the last one waits
        member.syncing = reply
        if self.phase is Phase.COMPLETING and member.id == self.leader:
            given = dict(request.assignments)
            for other in self.members.values():
                other.assignment = given.get(other.id, b"")
            self.phase = Phase.STABLE
            self.changed = True
        if self.phase is Phase.STABLE:
            for other in self.members.values():
                self._reply_sync(other, Code.NONE, now_s)

    def heartbeat(self, member_id: str, generation: int, now_s: float) -> None:
        """Raises `Rejected`: rejoin (27), or start over (22, 25)."""
        member = self._checked(member_id, generation)
        self._keep(member, now_s)
        if self.phase is Phase.PREPARING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)

    def leave(self, member_id: str, now_s: float) -> None:
        """Raises `Rejected` (25)."""
        if self.awaited.pop(member_id, None) is not None:
            return
        if member_id not in self.members:
            raise Rejected(Code.UNKNOWN_MEMBER_ID)
        self._remove(member_id, now_s)

    def check_commit(self, member_id: str, generation: int, now_s: float) -> None:
        """Whether an offset commit may be taken. Raises `Rejected` (22, 25, 27)."""
        if generation < 0 and not self.members:
            return  # a client that assigns partitions by itself
        member = self._checked(member_id, generation)
        self._keep(member, now_s)
        if self.phase is Phase.COMPLETING:
            raise Rejected(Code.REBALANCE_IN_PROGRESS)

    def check_member(self, member_id: str, generation: int, instance_id: str | None) -> None:
        """Raises `Rejected` (22, 25, 82) unless it is a member of this generation."""
        if instance_id is not None:
            static = self._static(instance_id)
            if static is not None and static.id != member_id:
                raise Rejected(Code.FENCED_INSTANCE_ID)
        self._checked(member_id, generation)

    def tick(self, now_s: float) -> None:
        """Remove members that went silent, and end a rebalance that a member delays. Called a few times a second."""
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

    def _checked(self, member_id: str, generation: int) -> GroupMember:
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
            raise Rejected(Code.GROUP_MAX_SIZE_REACHED, f"broker.group_members_max = {self.members_max}")

    def _rejoin(self, known: GroupMember, again: GroupMember, reply: JoinReply, now_s: float) -> None:
        if known.joining:  # asked twice: only the last one waits
            known.joining(self._refusal(Code.REBALANCE_IN_PROGRESS, known.id))
        same = known.protocols == again.protocols
        known.protocols = again.protocols
        known.session_timeout_s = again.session_timeout_s
        known.rebalance_timeout_s = again.rebalance_timeout_s
        known.joining = reply
        self._keep(known, now_s)
        settled = self.phase is Phase.COMPLETING or (self.phase is Phase.STABLE and known.id != self.leader)
        if same and settled:  # it missed our answer, or only checked for changes
            self._reply_join(known, now_s)
        else:
            self._rebalance(now_s)

    def _replace(self, old: GroupMember, new: GroupMember, reply: JoinReply, now_s: float) -> None:
        """A static member came back under a new id: it keeps its place, and its assignment if nothing else changed."""
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
            # Named after the old id, the leader does not recognize itself and does not assign anew.
            reply(JoinGroupResponse(0, Code.NONE, self.generation, self.protocol, leader, new.id, ()))
        else:
            self._rebalance(now_s)

    def _remove(self, member_id: str, now_s: float) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return  # the rebalance that removing another one completed has dropped it
        if member.joining:
            member.joining(self._refusal(Code.UNKNOWN_MEMBER_ID, member_id))
        if member.syncing:
            member.syncing(SyncGroupResponse(0, Code.UNKNOWN_MEMBER_ID, b""))
        self._rebalance(now_s)

    def _rebalance(self, now_s: float) -> None:
        """Ask all members to join again; complete at once if all have joined."""
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
        """Begin a generation with those who joined, and the static members, who may be late."""
        self.members = {key: m for key, m in self.members.items() if m.joining or m.instance_id is not None}
        joined = [member for member in self.members.values() if member.joining]
        if self.members and not joined:  # static members alone, all late: their sessions decide
            self.rebalance_ends_s = now_s + max(member.rebalance_timeout_s for member in self.members.values())
            return
        self.generation += 1
        if not joined:
            self._end()
            return
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        self.protocol = self._elected()
        self.phase = Phase.COMPLETING
        self.rebalance_ends_s = now_s + max(member.rebalance_timeout_s for member in self.members.values())
        for member in joined:
            self._reply_join(member, now_s)

    def _end(self) -> None:
        self.phase = Phase.EMPTY
        self.leader = self.protocol = ""
        self.changed = True

    def _elected(self) -> str:
        """The protocol that most members prefer among those that all know."""
        common = set.intersection(*({p.name for p in member.protocols} for member in self.members.values()))
        favourites = [next(p.name for p in m.protocols if p.name in common) for m in self.members.values()]
        return max(favourites, key=favourites.count)

    def _reply_join(self, member: GroupMember, now_s: float) -> None:
        assert member.joining is not None
        everybody = tuple(JoinedMember(m.id, m.instance_id, m.metadata(self.protocol)) for m in self.members.values())
        told = everybody if member.id == self.leader else ()
        reply, member.joining = member.joining, None
        self._keep(member, now_s)
        reply(JoinGroupResponse(0, Code.NONE, self.generation, self.protocol, self.leader, member.id, told))

    def _reply_sync(self, member: GroupMember, code: Code, now_s: float) -> None:
        if member.syncing:
            reply, member.syncing = member.syncing, None
            self._keep(member, now_s)
            reply(SyncGroupResponse(0, code, member.assignment))

    def _keep(self, member: GroupMember, now_s: float) -> None:
        member.expires_s = now_s + member.session_timeout_s

    @staticmethod
    def _refusal(code: Code, member_id: str) -> JoinGroupResponse:
        return JoinGroupResponse(0, code, -1, "", "", member_id, ())
