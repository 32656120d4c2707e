"""The format of the spool's files. Damage affects only the damaged records.

A segment is a file of a fixed size, allocated before it is used, with records one behind the other:

    magic 4 | payload length 4 | sequence 8 | CRC of these 4 | payload | BLAKE2b-16 of sequence and payload

The magic is no UTF-8 and payloads are, so no payload holds one. Behind a record with a damaged header the next one is
found by its magic and its header's CRC; a damaged payload is stepped over by its length. Either costs that record
alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

MAGIC = b"\xf5\xfeHR"
_HEADER = struct.Struct("<4sIQ")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CRC.size
_DIGEST_BYTES = 16
OVERHEAD_BYTES = _HEADER_BYTES + _DIGEST_BYTES
_STRAY_BYTES_MAX = OVERHEAD_BYTES // 2
"""Fewer bytes than this in unused space cannot be the rest of a record."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """One event as it waits. `value` is its bare JSON."""

    topic: str
    value: bytes
    traceparent: str | None = None
    seq: int = 0
    damage: str = ""
    """The reason why this is not the event that was written, and its position; `value` then holds the rest of its
    bytes."""


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A range of bytes in a segment. Without an event: bytes that never were a record."""

    event: Spooled | None
    end: int


def packed(event: Spooled, seq: int) -> bytes:
    about = json.dumps([event.topic, event.traceparent], ensure_ascii=False).encode()
    payload = about + b"\n" + event.value
    header = _HEADER.pack(MAGIC, len(payload), seq)
    return header + _CRC.pack(crc32(header)) + payload + _digest(seq, payload)


def scan(data: bytes, base: int, file_name: str) -> Iterator[ScannedRecord]:
    """Yield the records of `data` in order.

    Args:
        data: Bytes of a file.
        base: The position of `data` in the file.
        place: The name of the file, for damaged records.
    """
    at = 0
    while at < len(data):
        header = _header(data, at)
        if header is not None:
            seq, length = header
            end = at + OVERHEAD_BYTES + length
            yield ScannedRecord(_record(data[at:end], seq, f"{file_name}, byte {base + at}"), base + end)
        else:
            end = _next(data, at + 1)
            rest = data[at:end].rstrip(b"\0")
            if rest:
                yield ScannedRecord(_remains(rest, f"{file_name}, byte {base + at}"), base + at + len(rest))
        at = end


def _record(raw: bytes, seq: int, file_name: str) -> Spooled:
    payload, digest = raw[_HEADER_BYTES:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if digest != _digest(seq, payload):
        return Spooled("", raw, seq=seq, damage=f"{file_name}: the record does not match its digest")
    about, _, value = payload.partition(b"\n")
    topic, traceparent = json.loads(about)
    return Spooled(topic, value, traceparent, seq)


def _remains(raw: bytes, file_name: str) -> Spooled | None:
    if len(raw) - raw.count(0) < _STRAY_BYTES_MAX:
        return None
    return Spooled("", raw, damage=f"{file_name}: the record's header is damaged")


def _header(data: bytes, at: int) -> tuple[int, int] | None:
    """Sequence and payload length, when a whole record may lie here."""
    if data[at : at + 4] != MAGIC or at + OVERHEAD_BYTES > len(data):
        return None
    header = data[at : at + _HEADER.size]
    (crc,) = _CRC.unpack_from(data, at + _HEADER.size)
    if crc != crc32(header):
        return None
    _, length, seq = _HEADER.unpack(header)
    return (seq, length) if at + OVERHEAD_BYTES + length <= len(data) else None


def _next(data: bytes, at: int) -> int:
    """Return where the next readable record begins, or the end."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _header(data, at) is not None:
            return at
        at += 1
    return len(data)


def _digest(seq: int, payload: bytes) -> bytes:
    return blake2b(seq.to_bytes(8, "little") + payload, digest_size=_DIGEST_BYTES).digest()
