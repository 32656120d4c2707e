"""Coordinator of the consumer groups: it passes requests to groups, waits for their responses, and stores their
states."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from functools import partial

from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, GroupMember, Phase, restore, serialize
from headrace_broker.protocol.groups import (
    CommitTopic,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    OffsetCommitRequest,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.protocol.transactions import TxnOffsetCommitRequest
from headrace_broker.settings import BrokerSettings
from headrace_broker.stats import Stats
from headrace_broker.topics import CommittedOffsets
from headrace_broker.writer import T, Writer
from headrace_runtime.clock import Clock, epoch_ms

GROUPS_MAX = 2_000
"""Maximum number of consumer groups."""
_SESSION_TIMEOUT_MIN_S = 6.0
"""Shortest session timeout that a group member may choose, as in Apache Kafka."""
_SESSION_TIMEOUT_MAX_S = 1800.0
"""Longest session timeout that a group member may choose, as in Apache Kafka."""
GROUP_RETENTION_S = 30 * 86_400.0
"""Seconds after the last commit at which the offsets of a group without members are deleted."""

TICK_S = 0.2


class Coordinator:
    """Coordinator of all consumer groups. Request handlers call it in the event loop.

    Methods raise `Rejected`; storage errors become COORDINATOR_NOT_AVAILABLE.
    """

    def __init__(
        self, settings: BrokerSettings, writer: Writer, offsets: CommittedOffsets, clock: Clock, stats: Stats
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._offsets = offsets
        self._clock = clock
        self._stats = stats
        self._groups: dict[str, Group] = {}
        self._saves: dict[str, asyncio.Future[None]] = {}

    def load(self, rows: Iterable[tuple[str, bytes, int]]) -> None:
        """Restore stored groups at the start. Each row contains id, state and time of the last use in milliseconds."""
        for group_id, state, used_ms in rows:
            group = self._groups[group_id] = Group(group_id, used_ms=used_ms)
            restore(group, state, self._clock.monotonic_s())

    def all(self) -> list[Group]:
        """Return all groups."""
        return list(self._groups.values())

    def find(self, group_id: str) -> Group | None:
        """Return a group, or None if it does not exist."""
        return self._groups.get(group_id)

    async def join(self, request: JoinGroupRequest, client_id: str, client_host: str) -> JoinGroupResponse:
        """Handle JoinGroup: add a member to its group, and return once all members of the next generation have
        joined."""
        low, high = _SESSION_TIMEOUT_MIN_S, _SESSION_TIMEOUT_MAX_S
        if not low <= request.session_timeout_ms / 1000 <= high:
            raise Rejected(Code.INVALID_SESSION_TIMEOUT, f"the session timeout must be between {low} s and {high} s")
        now_s = self._clock.monotonic_s()
        member = GroupMember(
            id=request.member_id or f"{request.group_instance_id or client_id}-{uuid.uuid4()}",
            instance_id=request.group_instance_id,
            client_id=client_id,
            client_host=client_host,
            session_timeout_s=request.session_timeout_ms / 1000,
            rebalance_timeout_s=request.rebalance_timeout_ms / 1000,
            protocols=request.protocols,
            expires_s=now_s + request.session_timeout_ms / 1000,
        )
        unknown = request.group_id not in self._groups
        group = self._group(request.group_id, create=not request.member_id)
        answer: asyncio.Future[JoinGroupResponse] = asyncio.get_running_loop().create_future()
        try:
            group.join(request, member, partial(_answer, answer), now_s)
        except Rejected as error:
            if unknown and error.code is not Code.MEMBER_ID_REQUIRED:
                del self._groups[group.id]  # it was created for this request
            return JoinGroupResponse(0, error.code, -1, "", "", member.id, ())
        self._save_if_changed(group)
        return await answer

    async def sync(self, request: SyncGroupRequest) -> SyncGroupResponse:
        """Handle SyncGroup: wait until the leader has assigned partitions, and return the member's assignment, which is
        then durable."""
        group = self._group(request.group_id)
        answer: asyncio.Future[SyncGroupResponse] = asyncio.get_running_loop().create_future()
        group.sync(request, partial(_answer, answer), self._clock.monotonic_s())
        self._save_if_changed(group)
        response = await answer
        save = self._saves.get(group.id)
        if save is not None and response.error_code == Code.NONE:
            await self._stored(asyncio.shield(save))
        return response

    def heartbeat(self, request: HeartbeatRequest) -> None:
        """Handle Heartbeat: extend the session of a member."""
        group = self._group(request.group_id)
        group.heartbeat(request.member_id, request.generation_id, self._clock.monotonic_s())

    async def leave(self, request: LeaveGroupRequest) -> None:
        """Handle LeaveGroup: remove the member from its group."""
        group = self._group(request.group_id)
        group.leave(request.member_id, self._clock.monotonic_s())
        self._save_if_changed(group)

    async def commit(self, request: OffsetCommitRequest, topics: tuple[CommitTopic, ...]) -> None:
        """Store committed offsets of a group, after checking the member and its generation. The partitions of `topics`
        must exist."""
        group = self._group(request.group_id, create=request.generation_id < 0)
        group.check_commit(request.member_id, request.generation_id, self._clock.monotonic_s())
        group.used_ms = epoch_ms(self._clock.now())
        await self._stored(self._writer.submit(partial(self._offsets.commit, group.id, topics, group.used_ms)))

    def ensure_group(self, group_id: str) -> None:
        """Create the group unless it exists, because a transaction will commit offsets for it."""
        self._group(group_id, create=True).used_ms = epoch_ms(self._clock.now())

    def check_transactional_commit(self, request: TxnOffsetCommitRequest) -> None:
        """Check that the sender of offsets in a transaction is still a member of the group.

        A rebalance in progress is no reason for a refusal, because the next owner of a partition waits until the
        transaction ends.

        Raises:
            Rejected: it is no longer a member (22, 25, 82).
        """
        if request.generation_id < 0 and not request.member_id:
            return  # the sender does not claim to be a member
        group = self._groups.get(request.group_id)
        if group is None:
            raise Rejected(Code.ILLEGAL_GENERATION, f"group {request.group_id} does not exist")
        group.check_member(request.member_id, request.generation_id, request.group_instance_id)

    async def delete(self, group_id: str) -> None:
        """Delete a group and its offsets. Raises `Rejected` with error code 68 or 69."""
        group = self._groups.get(group_id)
        if group is None:
            raise Rejected(Code.GROUP_ID_NOT_FOUND)
        if group.phase is not Phase.EMPTY:
            raise Rejected(Code.NON_EMPTY_GROUP)
        del self._groups[group_id]
        try:
            await self._stored(self._writer.submit(partial(self._offsets.delete_group, group_id)))
        except Rejected:
            self._groups.setdefault(group_id, group)
            raise

    def tick(self) -> None:
        """Remove members whose sessions have expired, end rebalances that wait for the rest of their time, and store
        changed groups. Must be called every `TICK_S`."""
        now_s = self._clock.monotonic_s()
        for group in self._groups.values():
            group.tick(now_s)
            self._save_if_changed(group)

    async def expire(self) -> None:
        """Delete groups that were not used for `GROUP_RETENTION_S`."""
        before_ms = epoch_ms(self._clock.now()) - round(GROUP_RETENTION_S * 1000)
        for group in self.all():
            if group.phase is Phase.EMPTY and not group.awaited and group.used_ms < before_ms:
                await self.delete(group.id)

    def _group(self, group_id: str, *, create: bool = False) -> Group:
        if not group_id:
            raise Rejected(Code.INVALID_GROUP_ID, "the group id must not be empty")
        group = self._groups.get(group_id)
        if group is None:
            if not create:
                raise Rejected(Code.UNKNOWN_MEMBER_ID)
            if len(self._groups) >= GROUPS_MAX:
                raise Rejected(
                    Code.POLICY_VIOLATION, f"the broker has {GROUPS_MAX} consumer groups, which is the limit"
                )
            group = self._groups[group_id] = Group(group_id)
            group.used_ms = epoch_ms(self._clock.now())
        return group

    def _save_if_changed(self, group: Group) -> None:
        if not group.changed:
            return
        group.changed = False
        group.used_ms = epoch_ms(self._clock.now())
        self._stats.rebalances += group.phase is Phase.STABLE
        save = self._writer.submit(partial(self._offsets.save_group, group.id, serialize(group), group.used_ms))
        self._saves[group.id] = save
        save.add_done_callback(partial(self._saved, group.id))

    def _saved(self, group_id: str, save: asyncio.Future[None]) -> None:
        if self._saves.get(group_id) is save:
            del self._saves[group_id]

    @staticmethod
    async def _stored(write: asyncio.Future[T]) -> T:
        try:
            return await write
        except Rejected as error:
            if error.code is Code.STORAGE_ERROR:
                raise Rejected(Code.COORDINATOR_NOT_AVAILABLE, str(error)) from error
            raise


def _answer(future: asyncio.Future[T], response: T) -> None:
    if not future.done():  # the client may have disconnected
        future.set_result(response)
