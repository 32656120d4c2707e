"""Events to Kafka records and back: envelope in headers, large values in the blob store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from headrace_runtime import damage, provenance, tracing
from headrace_runtime.aside import beside_loop
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock
from headrace_runtime.errors import CorruptBlob, InvalidEvent, MissingBlob
from headrace_runtime.json_bounds import more_values_than
from headrace_schemas import Event, Reward
from headrace_schemas.blobs import PAYLOAD_BYTES_MAX, BlobRef
from headrace_schemas.envelope import Envelope, Headers, is_own
from headrace_schemas.ids import derived_id
from headrace_schemas.records import parse_record
from headrace_schemas.text import storable

_SHOWS_WITHIN_S = 2.0
UNKNOWN_TENANT = ""
"""The tenant of records that name none: they count together."""
_TENANT_LENGTH_MAX = 512
_PEEKED_BYTES_MAX = 1_048_576
RawHeaders = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """What a consumer got, untouched."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: RawHeaders = ()
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a producer will send. `partition` None lets the key decide (murmur2, as Kafka's own clients)."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Headers
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A valid event with its envelope and the record that it came in."""

    event: Event
    envelope: Envelope
    record: Record

    @property
    def identity(self) -> str:
        """The id of the event among those of all tenants; that of the default tenant is the event's own.

        Callers choose parts of some ids, so two tenants may send events of one id.
        """
        tenant = tenant_of(self)
        if tenant in (UNKNOWN_TENANT, "default"):
            return self.envelope.id
        return derived_id("event-of-tenant", tenant, self.envelope.id)

    @property
    def place(self) -> int:
        """Its place among the records of its key: the offset, the first one where a dead letter was put back."""
        return self.record.offset if self.envelope.sequence is None else self.envelope.sequence


async def encode(
    event: Event,
    source: str,
    blobs: BlobStore,
    *,
    partition: int | None = None,
    after: Mapping[str, int] | None = None,
) -> Outgoing:
    """The record for `event`, carrying the current trace. A value over 256 KiB is stored and a reference sent.

    Raises `Unavailable` when the blob store is needed and away.
    """
    envelope = Envelope.of(event, source, tracing.current(), after=after)
    value = event.to_json()
    if len(value) > PAYLOAD_BYTES_MAX:
        ref = await blobs.aput(value)
        value = ref.model_dump_json().encode()
        envelope = Envelope.of(event, source, tracing.current(), dataref=ref.uri, after=after)
    return Outgoing(event.topic, event.key.encode(), value, envelope.headers(), partition)


def tombstone(topic: str, key: str) -> Outgoing:
    """Removes `key` from a compacted topic."""
    return Outgoing(topic, key.encode(), None, ())


async def decode(record: Record, blobs: BlobStore, *, topic: str | None = None) -> Received:
    """The event in `record`. `topic` names the event type when the record's own topic is a copy of another.

    Raises `InvalidEvent` for bytes that can never become valid, `Unavailable` when a referenced blob cannot be fetched,
    `MissingBlob` of these when the store answers and has none.
    """
    found = dict(record.headers).get(damage.HEADER)
    if found is not None:
        raise InvalidEvent("damaged_record", f"the batch cannot be read, {found.decode('utf-8', 'replace')}")
    model, value = parse_record(topic or record.topic, record.value, record.headers)
    if isinstance(value, BlobRef):
        value = await _fetch(model.type, value, blobs)
    own = is_own(record.headers)
    event = await beside_loop(len(value), partial(_parse, model, value, own=own))
    try:
        envelope = Envelope.read(record.headers, event)
    except ValueError:  # `derived_id` refuses it
        raise InvalidEvent("invalid_event", f"{model.type}: an identifier holds a NUL character") from None
    if isinstance(event, Reward):
        provenance.check(event, envelope.source)
    return Received(event, envelope, record)


def tenant_of(item: Received | Record) -> str:
    """Return the tenant that an event or the value of a record names, else `UNKNOWN_TENANT`."""
    if isinstance(item, Received):
        return str(getattr(item.event, "tenant", UNKNOWN_TENANT))
    try:
        tenant = json.loads((item.value or b"")[:_PEEKED_BYTES_MAX]).get("tenant")
    except Exception:  # noqa: BLE001 (the value may be anything, deeper than the parser goes included)
        return UNKNOWN_TENANT
    return storable(tenant[:_TENANT_LENGTH_MAX]) if isinstance(tenant, str) else UNKNOWN_TENANT


class Patience:
    """Waits once, however many blobs of a batch are missing: a store may show late what was just written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited = False

    async def decode(self, record: Record, blobs: BlobStore, *, topic: str | None = None) -> Received:
        """`decode`, in which a blob that stays missing is damage like any other: raises `InvalidEvent`."""
        try:
            return await decode(record, blobs, topic=topic)
        except MissingBlob:
            if not self._waited:
                self._waited = True
                await self._clock.sleep(_SHOWS_WITHIN_S)
        try:
            return await decode(record, blobs, topic=topic)
        except MissingBlob as error:
            raise InvalidEvent("missing_blob", str(error)) from error


def _parse(model: type[Event], value: bytes, *, own: bool) -> Event:
    if not own and more_values_than(value, model.values_max, model.containers_max):
        text = (
            f"{model.type}: the record holds more than {model.values_max} JSON values, or more than "
            f"{model.containers_max} objects and lists; send arrays of numbers in base64, and long runs in parts"
        )
        raise InvalidEvent("too_many_values", text)
    return model.from_json(value)


async def _fetch(kind: str, ref: BlobRef, blobs: BlobStore) -> bytes:
    try:
        return await blobs.aget(ref)
    except CorruptBlob as error:
        raise InvalidEvent("corrupt_blob", f"{kind}: {error}") from error
