"""A group as it is saved, so that a restart of the broker costs no rebalance. Written with the wire codec."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.group import Group, GroupMember, Phase
from headrace_broker.protocol.groups import Protocol
from headrace_broker.wire import Bytes, Int32, NullableString, String, WireReader, decode, encode


class SavedMember(NamedTuple):
    """A member with its assignment."""

    id: String
    instance_id: NullableString
    client_id: String
    client_host: String
    session_timeout_ms: Int32
    rebalance_timeout_ms: Int32
    protocols: tuple[Protocol, ...]
    assignment: Bytes


class SavedGroup(NamedTuple):
    """A group at rest: stable, or without members."""

    generation: Int32
    protocol_type: String
    protocol: String
    leader: String
    members: tuple[SavedMember, ...]


def saved(group: Group) -> bytes:
    """Valid for a group that is stable or empty."""
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
    """Put a saved state into a new group. Each member has its whole session timeout to be heard of again."""
    if not state:  # it has offsets and never had members
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
