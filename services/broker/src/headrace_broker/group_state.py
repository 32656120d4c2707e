"""Serialized state of groups, so that a restart of the broker causes no rebalance. It uses the wire codec."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.group import Group, GroupMember, Phase
from headrace_broker.protocol.groups import Protocol
from headrace_broker.wire import Bytes, Int32, NullableString, String, WireReader, decode, encode


class SavedMember(NamedTuple):
    """Stored state of a group's member, with its assignment."""

    id: String
    instance_id: NullableString
    client_id: String
    client_host: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    protocols: tuple[Protocol, ...]
    assignment: Bytes


class SavedGroup(NamedTuple):
    """Stored state of a group, which was stable or had no members."""

    generation: Int32
    protocol_type: String
    protocol: String
    leader: String
    members: tuple[SavedMember, ...]


def serialize(group: Group) -> bytes:
    """Return the stored form of a group, which must be stable or empty."""
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
    """Restore a saved state into a new group. The session of each member begins again."""
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
