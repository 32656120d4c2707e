"""Conversion of events to Kafka records and back. The envelope is stored in headers, and large values in the blob
store.

The values in a JSON text are counted before it is parsed. A parser holds the interpreter lock until it is done, and its
time depends on the number of values rather than on the bytes: 8 MB of one string take 20 ms, 8 MB of `{}` two seconds,
even in a thread. An object or a list costs ten times as much as a number, in parsing and afterwards, so objects and
lists are also counted separately.

Some reward sources are reserved for Headrace's own services. This module checks the producer of a reward, because all
consumers of rewards decode their records here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from headrace_runtime.clock import Clock
from headrace_runtime.errors import CorruptBlob, InvalidEvent, MissingBlob
from headrace_runtime.kafka import damage
from headrace_runtime.process import logs
from headrace_runtime.process.event_loop import run_off_loop
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Reward
from headrace_schemas.events.envelope import Envelope, Headers, is_own, parse_record
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX, BlobRef
from headrace_schemas.values.ids import derived_id, reserved_producer
from headrace_schemas.values.text import printable, storable

_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_REST = re.compile(_STRING + rb'(")?', re.DOTALL)
_WHOLE_STRING = re.compile(rb'"' + _STRING + rb'"', re.DOTALL)
_PORTION_BYTES = 262_144
"""Number of bytes that are scanned before the interpreter lock is released for other threads."""


def exceeds_value_limits(body: bytes, values_max: int, containers_max: int | None = None) -> bool:
    """Return whether `body` contains more than `values_max` values or more than `containers_max` objects and lists.

    Values are counted by the characters that separate and open them, so `body` need not be valid JSON. The strings are
    removed first, because these characters mean nothing in them.
    """
    opened_max = values_max if containers_max is None else containers_max
    opening = body.count(b"[") + body.count(b"{")
    if opening + body.count(b",") <= values_max and opening <= opened_max:
        return False
    count = opened = at = 0
    inside = False
    while at < len(body):
        end = min(at + _PORTION_BYTES, len(body))
        if inside:
            rest = _REST.match(body, at, end)
            assert rest is not None, "the pattern matches the empty string"
            at, inside = rest.end(), rest.group(1) is None
            if inside and end == len(body):
                return False
        if not inside:
            outside = _WHOLE_STRING.sub(b"", body[at:end])
            quote = outside.find(b'"')  # of a string that goes on in the next portion
            inside = quote >= 0
            at = end - (len(outside) - quote - 1) if inside else end
            outside = outside[:quote] if inside else outside
            opened += outside.count(b"[") + outside.count(b"{")
            count += outside.count(b"[") + outside.count(b"{") + outside.count(b",")
            if count > values_max or opened > opened_max:
                return True
    return False


_REVISION_MAX = 1_000_000_000
"""Highest revision that external producers may send, so that later revisions of a service still fit the database."""


def check(reward: Reward, producer: str) -> None:
    """Check that `producer`, the source in the envelope, may send this reward. Raises `InvalidEvent`."""
    service = reserved_producer(reward.source)
    if service is not None:
        if producer != f"headrace/{service}":
            text = f"source: {printable(reward.source)!r} is reserved for the {service}; use another source"
            raise InvalidEvent("reserved_source", text)
    elif reward.revision > _REVISION_MAX:
        raise InvalidEvent("invalid_event", f"revision = {reward.revision}: must be at most {_REVISION_MAX}")


_MISSING_BLOB_WAIT_S = 2.0
"""Seconds after which a new blob is visible in every kind of store."""
UNKNOWN_TENANT = ""
"""Name under which records without a tenant are counted together."""
_TENANT_LENGTH_MAX = 512
_PEEKED_BYTES_MAX = 1_048_576
RawHeaders = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Record read from the bus, not yet decoded."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: RawHeaders = ()
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Record to send. If `partition` is None, the key determines the partition (murmur2, as in Kafka's own clients)."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Headers
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """Decoded event with its envelope and its record."""

    event: Event
    envelope: Envelope
    record: Record

    @property
    def identity(self) -> str:
        """Id of the event, unique among all tenants. For the default tenant it is the event's own id.

        Callers choose parts of some ids, so events of two tenants may have the same id.
        """
        tenant = tenant_of(self)
        if tenant in (UNKNOWN_TENANT, "default"):
            return self.envelope.id
        return derived_id("event-of-tenant", tenant, self.envelope.id)

    @property
    def size_bytes(self) -> int:
        """The size of the event as JSON, also of an event whose record contains only a blob reference."""
        value = self.record.value or b""
        return len(value) if self.envelope.dataref is None else BlobRef.model_validate_json(value).size

    @property
    def log_offset(self) -> int:
        """Offset by which the record is ordered among those of its key: its own, or for a retried dead letter the
        original one."""
        return self.record.offset if self.envelope.sequence is None else self.envelope.sequence


async def encode(
    event: Event,
    source: str,
    blobs: BlobStore,
    *,
    partition: int | None = None,
    after: Mapping[str, int] | None = None,
) -> Outgoing:
    """Encode `event` as a record with the current trace context. A value over 256 KiB is stored as a blob and replaced
    by a reference.

    Args:
        event: the event.
        source: the value of `ce_source`.
        blobs: the store of large values.
        partition: the partition, or None to derive it from the key.
        after: end offsets of topics that the envelope contains (see `Envelope.after`).

    Raises:
        Unavailable: the blob store does not respond.
    """
    envelope = Envelope.of(event, source, logs.current_traceparent(), after=after)
    value = event.to_json()
    if len(value) > PAYLOAD_BYTES_MAX:
        ref = await blobs.aput(value)
        value = ref.model_dump_json().encode()
        envelope = Envelope.of(event, source, logs.current_traceparent(), dataref=ref.uri, after=after)
    return Outgoing(event.topic, event.key.encode(), value, envelope.headers(), partition)


def tombstone(topic: str, key: str) -> Outgoing:
    """Return the record that deletes `key` from a compacted topic."""
    return Outgoing(topic, key.encode(), None, ())


async def decode(record: Record, blobs: BlobStore, *, topic: str | None = None) -> Received:
    """Decode the event in `record`.

    Args:
        record: the record.
        blobs: the store of large values.
        topic: the topic that determines the event type, if the record was read from a copy of that topic.

    Raises:
        InvalidEvent: the record can never become valid.
        Unavailable: a referenced blob cannot be fetched.
        MissingBlob: the blob store is reachable but lacks the blob. It is a subclass of `Unavailable`.
    """
    batch_damage = dict(record.headers).get(damage.HEADER)
    if batch_damage is not None:
        raise InvalidEvent("damaged_record", f"the batch cannot be read, {batch_damage.decode('utf-8', 'replace')}")
    model, value = parse_record(topic or record.topic, record.value, record.headers)
    if isinstance(value, BlobRef):
        value = await _fetch(model.type, value, blobs)
    parse = partial(_parse, model, value, is_bounded=is_own(record.headers))
    event = await run_off_loop(len(value), parse)
    try:
        envelope = Envelope.read(record.headers, event)
    except ValueError:  # from `derived_id`
        raise InvalidEvent("invalid_event", f"{model.type}: an identifier contains a NUL character") from None
    if isinstance(event, Reward):
        check(event, envelope.source)
    return Received(event, envelope, record)


def tenant_of(item: Received | Record) -> str:
    """Return the tenant of an event, or of the JSON value of a record, or `UNKNOWN_TENANT` without one."""
    if isinstance(item, Received):
        return str(getattr(item.event, "tenant", UNKNOWN_TENANT))
    try:
        tenant = json.loads((item.value or b"")[:_PEEKED_BYTES_MAX]).get("tenant")
    except Exception:  # noqa: BLE001 (the value may be anything, also nested too deeply for the parser)
        return UNKNOWN_TENANT
    return storable(tenant[:_TENANT_LENGTH_MAX]) if isinstance(tenant, str) else UNKNOWN_TENANT


class BatchDecoder:
    """Decoder of the records of one batch. If blobs are missing, it waits once for all of them, because new blobs may
    appear late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited = False

    async def decode(self, record: Record, blobs: BlobStore, *, topic: str | None = None) -> Received:
        """Decode a record as the function `decode` does, but raise `InvalidEvent` for a blob that is still missing
        after the wait."""
        try:
            return await decode(record, blobs, topic=topic)
        except MissingBlob:
            if not self._waited:
                self._waited = True
                await self._clock.sleep(_MISSING_BLOB_WAIT_S)
        try:
            return await decode(record, blobs, topic=topic)
        except MissingBlob as error:
            raise InvalidEvent("missing_blob", str(error)) from error


def _parse(model: type[Event], value: bytes, *, is_bounded: bool) -> Event:
    """Parse the JSON of an event. If `is_bounded`, a service of Headrace has already limited the number of values, and
    it is not checked."""
    if not is_bounded and exceeds_value_limits(value, model.values_max, model.containers_max):
        text = (
            f"{model.type}: the record contains more than {model.values_max} JSON values, or more than "
            f"{model.containers_max} objects and lists; send arrays of numbers in base64, and split long runs"
        )
        raise InvalidEvent("too_many_values", text)
    return model.from_json(value)


async def _fetch(kind: str, ref: BlobRef, blobs: BlobStore) -> bytes:
    try:
        return await blobs.aget(ref)
    except CorruptBlob as error:
        raise InvalidEvent("corrupt_blob", f"{kind}: {error}") from error
