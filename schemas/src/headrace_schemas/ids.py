"""Identifiers: UUIDv7 for new facts, UUIDv5 for facts that can be produced twice, self-routing response ids."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
import uuid

NAMESPACE = uuid.UUID("6f1d3c1e-9c0e-5d0a-8a55-6865616472ab")
"""The UUIDv5 namespace of every deterministic Headrace id. Changing it would make replayed facts look new."""

SESSION_KEY_LENGTH = 16
_RESPONSE_ID = re.compile(rf"^chatcmpl-([a-z2-7]{{{SESSION_KEY_LENGTH}}})-([0-9a-f]{{32}})$")
_TENANT_PREFIX = re.compile(rf"^tenant-[a-z2-7]{{{SESSION_KEY_LENGTH}}}/")
_DEFAULT_TENANT = "default"
_NAME_LENGTH_MAX = 512


def uuid7(unix_ms: int | None = None) -> uuid.UUID:
    """A time-ordered UUID (RFC 9562 section 5.7). `unix_ms` defaults to now."""
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    value = int.from_bytes(stamp.to_bytes(6, "big") + os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return uuid.UUID(int=value)


def derived_id(kind: str, *parts: object) -> str:
    """The id of a fact that may be produced twice: equal sources give equal ids (UUIDv5, RFC 9562 section 5.5).

    `kind` keeps ids of different nouns apart; no part may hold the NUL that joins them.
    """
    texts = [kind, *(str(part) for part in parts)]
    if any("\0" in text for text in texts):
        raise ValueError(f"derived_id: a part of {texts!r} holds a NUL character; strip it first")
    return str(uuid.uuid5(NAMESPACE, "\0".join(texts)))


def session_key(tenant: str, session_id: str) -> str:
    """The partition key of everything that belongs to one session: 80 bits of SHA-256 in lower-case base32.

    It hides the user's own id from response ids and keeps them under 64 characters. Tenants never share a key.
    """
    digest = hashlib.sha256(f"{tenant}\0{session_id}".encode("utf-8", "surrogatepass")).digest()[:10]
    return base64.b32encode(digest).decode().lower()


def tenant_name(tenant: str, name: str) -> str:
    """Return `name` with its tenant before it. No two pairs of a tenant and a name share a result."""
    return f"/{len(tenant)}/{tenant}/{name}" if "/" in tenant else f"{tenant}/{name}"


def ingested_trajectory_id(tenant: str, name: str) -> str:
    """Return the id of a trajectory that a tenant named itself, which is no other tenant's id.

    Those of the tenant `default` keep their names, unless they have a tenant's prefix. The others get a prefix, once:
    names that have it already keep it.
    """
    if tenant == _DEFAULT_TENANT and not has_tenant_prefix(name):
        return name
    prefix = f"tenant-{session_key(tenant, 'trajectories')}/"
    if name.startswith(prefix):
        return name
    whole = prefix + name
    return whole if len(whole) <= _NAME_LENGTH_MAX else prefix + derived_id("ingested-trajectory", name)


def has_tenant_prefix(trajectory_id: str) -> bool:
    """Return whether a trajectory id has the prefix that `ingested_trajectory_id` gives."""
    return _TENANT_PREFIX.match(trajectory_id) is not None


def response_id(key: str, turn_uuid: uuid.UUID | None = None) -> str:
    """`chatcmpl-<session key>-<uuid7>`: feedback that carries only this id finds its partition with no lookup."""
    return f"chatcmpl-{key}-{(turn_uuid or uuid7()).hex}"


def key_of_response(response: str) -> str | None:
    """The session key inside a response id, or None when the id is not one of ours."""
    match = _RESPONSE_ID.match(response)
    return match.group(1) if match else None
