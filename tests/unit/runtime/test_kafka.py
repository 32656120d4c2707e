"""Tests of records, tables and topics on the bus.

Events are converted to records and back, small and large. The number of values in a JSON text is known before parsing.
A table is tested with an unavailable bus. A created topic can be used even if some brokers learn of it later. A
gateway learns versions and the algorithms that train them only from published records.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka import topics, wire
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.known_versions import KnownVersions
from headrace_runtime.kafka.wire import Outgoing, Record, decode, encode, exceeds_value_limits
from headrace_runtime.process import logs
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import store
from headrace_schemas import EVENTS, Checkpoint, Event, Feedback, Routing
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX, BlobRef, Fingerprint
from tests.support.hostile_json import event_examples
from tests.support.machine import blocked
from tests.support.processes import free_port


def damage(ref: BlobRef) -> None:
    Path(ref.uri.removeprefix("file://")).write_bytes(b"garbage")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path.as_uri())


def feedback(comment: str = "fine") -> Feedback:
    return Feedback(time=utcnow(), feedback_id="f", session_key="a" * 16, value=1.0, comment=comment)


def as_record(sent: Outgoing) -> Record:
    return Record(sent.topic, 0, 7, sent.key, sent.value, sent.headers)


async def test_a_small_event_is_its_own_json(blobs: BlobStore) -> None:
    event = feedback()
    with logs.span(None) as trace:
        sent = await encode(event, "headrace/test", blobs)
    assert sent.value == event.to_json()
    received = await decode(as_record(sent), blobs)
    assert received.event == event
    assert received.envelope.traceparent == trace
    assert received.envelope.source == "headrace/test"
    assert list(blobs.digests()) == []


async def test_a_large_event_travels_as_a_reference(blobs: BlobStore) -> None:
    event = feedback("x" * PAYLOAD_BYTES_MAX)
    sent = await encode(event, "headrace/test", blobs)
    assert sent.value is not None
    ref = BlobRef.model_validate_json(sent.value)
    assert ref.size > PAYLOAD_BYTES_MAX
    received = await decode(as_record(sent), blobs)
    assert received.event == event
    assert received.envelope.dataref == ref.uri


async def test_a_missing_blob_is_unavailable_and_a_corrupt_one_invalid(blobs: BlobStore) -> None:
    sent = await encode(feedback("x" * PAYLOAD_BYTES_MAX), "headrace/test", blobs)
    assert sent.value is not None
    ref = BlobRef.model_validate_json(sent.value)
    damage(ref)
    with pytest.raises(InvalidEvent) as refusal:
        await decode(as_record(sent), blobs)
    assert refusal.value.reason == "corrupt_blob"
    blobs.delete(ref)
    with pytest.raises(Unavailable):
        await decode(as_record(sent), blobs)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record("feedback", 0, 0, b"k", None), "empty_value"),
        (Record("feedback", 0, 0, b"k", b"{"), "invalid_json"),
        (Record("feedback", 0, 0, b"k", b"{}"), "invalid_event"),
        (Record("nonsense", 0, 0, b"k", b"{}"), "unknown_topic"),
        (Record("feedback", 0, 0, b"k", b"{}", (("ce_dataref", b"x"),)), "invalid_blob_reference"),
    ],
)
async def test_poison_has_a_reason(blobs: BlobStore, record: Record, reason: str) -> None:
    with pytest.raises(InvalidEvent) as refusal:
        await decode(record, blobs)
    assert refusal.value.reason == reason


async def test_an_identifier_from_which_no_id_can_be_derived_is_poison(blobs: BlobStore) -> None:
    value = feedback().to_json().replace(b'"feedback_id":"f"', b'"feedback_id":"f\\u0000"')
    with pytest.raises(InvalidEvent) as refusal:
        await decode(Record("feedback", 0, 0, b"k", value), blobs)
    assert refusal.value.reason == "invalid_event"


async def test_a_record_full_of_values_is_parsed_beside_the_event_loop(blobs: BlobStore) -> None:
    context = {"x": [{"a": "b"}] * 8000}  # below the size from which values are in the blob store
    value = json.dumps(json.loads(feedback("x").to_json()) | {"context": context}).encode()
    assert len(value) < PAYLOAD_BYTES_MAX
    async with blocked() as block:
        for _ in range(3):
            await decode(Record("feedback", 0, 0, b"k", value, Envelope.of(feedback("x"), "outside").headers()), blobs)
    assert block.busy_s < 0.01


def separators(value: object) -> int:
    """Return the number of openings and separators in `value` by recursion."""
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + sum(map(separators, value.values()))
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(separators, value))
    return 0


def drawn(rng: random.Random, depth: int = 4) -> object:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return rng.randrange(100)
    if kind <= 2:
        return "".join(rng.choice('a,[{"\\\\"é\n') for _ in range(rng.randrange(12)))
    if kind == 3:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {str(drawn(rng, 0)): drawn(rng, depth - 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("portion", [1, 2, 3, 7, 1000])
def test_what_stands_in_strings_does_not_count(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    monkeypatch.setattr(wire, "_PORTION_BYTES", portion + 1)  # a portion holds an escape as a whole
    for _ in range(200):
        value = [drawn(rng), ",,,[[[{{{"]
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        count = separators(value)
        assert not exceeds_value_limits(body, count), body
        assert exceeds_value_limits(body, count - 1), body


@pytest.mark.parametrize("body", [b'"' + b",[{" * 5, b'["\\', b',,,"\\', b'"\\"\\', b"", b'"', b"\\"])
def test_what_is_no_json_ends_too(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PORTION_BYTES", 2)
    assert exceeds_value_limits(body, 2) == (body.startswith(b",,,"))


def test_text_full_of_commas_is_one_value() -> None:
    assert not exceeds_value_limits(json.dumps({"content": "1,2,3\n" * 500_000}).encode(), 10)


@pytest.mark.parametrize("portion", [2, 1000])
def test_objects_and_lists_are_counted_by_themselves(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    monkeypatch.setattr(wire, "_PORTION_BYTES", portion)
    for _ in range(100):
        body = json.dumps([drawn(rng), [1, 2, 3], "[{" * 9]).encode()
        containers = opened(json.loads(body))
        assert not exceeds_value_limits(body, 10**6, containers), body
        assert exceeds_value_limits(body, 10**6, containers - 1), body


def opened(value: object) -> int:
    """Return the number of objects and lists in `value` by recursion."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + sum(map(opened, inside))


async def test_waiting_for_the_bus_leaves_no_reader_open(tmp_path: Path) -> None:
    async def refuse(_record: Record, _error: InvalidEvent) -> None:
        raise AssertionError("there is nothing to refuse")

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    bus = BusSettings(address=f"127.0.0.1:{free_port()}")
    table = TopicTable(Routing, bus, "test", BlobStore(tmp_path.as_uri()), refuse)
    waiting = asyncio.create_task(table.run())
    await asyncio.sleep(0.7)  # one attempt and the next
    waiting.cancel()
    await asyncio.wait([waiting])
    gc.collect()
    assert not table.loaded.is_set()
    assert complaints == []


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, UnicodeError])
@pytest.mark.parametrize("topic", ["routing", "replicas", "checkpoints"])
async def test_a_row_that_breaks_its_reader_is_refused_and_the_one_before_stays(
    tmp_path: Path, topic: str, error: type[Exception]
) -> None:
    """A bad record is skipped at every stage: in decoding, in acceptance, and in the callback."""
    kind = EVENTS[topic]
    value = json.dumps(next(iter(event_examples(topic).values()))).encode()
    refused: list[tuple[int, str]] = []

    async def refuse(record: Record, why: InvalidEvent) -> None:
        refused.append((record.offset, why.reason))

    poisoned: set[str] = set()

    def changed(_key: str, _event: Event | None) -> None:
        if "changed" in poisoned:
            raise error("poison \x00 \ud83d")

    def accepts(_event: Event) -> bool:
        if "accepts" in poisoned:
            raise error("poison")
        return True

    bus = BusSettings(address="127.0.0.1:1")
    table: TopicTable[Event] = TopicTable(kind, bus, "test", BlobStore(tmp_path.as_uri()), refuse, changed, accepts)
    await table._apply(Record(topic, 0, 0, b"a", value))
    before = dict(table.rows)
    assert list(before) == ["a"]
    for offset, stage in enumerate(["changed", "accepts"], 1):
        poisoned.add(stage)
        await table._apply(Record(topic, 0, offset, b"a", value))
        await table._apply(Record(topic, 0, 10 + offset, b"new", value))
        poisoned.clear()
    await table._apply(Record(topic, 0, 5, b"a", b"[" * 100_000))
    assert table.rows == before
    assert [offset for offset, _ in refused] == [1, 11, 2, 12, 5]
    await table._apply(Record(topic, 0, 6, b"b", value))
    assert list(table.rows) == ["a", "b"]


class LateCluster:
    """Cluster and client that create topics at once, but list them only from the call number `shown_at` on."""

    def __init__(self, shown_at: int) -> None:
        self._shown_at, self.looks = shown_at, 0
        self.made: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def list_topics(self) -> list[str]:
        self.looks += 1
        return self.made if self.looks >= self._shown_at else []

    async def create_topics(self, new: list[Any], **_how: object) -> Any:
        self.made = [topic.name for topic in new]
        return SimpleNamespace(topic_errors=())


async def ensured(monkeypatch: pytest.MonkeyPatch, cluster: LateCluster, timeout_s: float) -> None:
    async def nothing(*_arguments: object) -> None: ...

    monkeypatch.setattr(topics, "AIOKafkaAdminClient", lambda **_how: cluster)
    monkeypatch.setattr(topics, "_check", nothing)
    await topics.ensure(BusSettings(start_timeout_s=timeout_s), ("turns", "feedback"))


async def test_what_was_created_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LateCluster(shown_at=3)
    await ensured(monkeypatch, cluster, 30.0)
    assert cluster.looks == 3
    assert set(cluster.made) == {"turns", "feedback"}


async def test_topics_that_never_show_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"has created (feedback, turns|turns, feedback) but does"):
        await ensured(monkeypatch, LateCluster(shown_at=1000), 0.1)


SFT = LearnedSignals(algorithm="sft", rewards=False, edits=True, preferences=False, logprobs=False)


KTO = LearnedSignals(algorithm="kto", rewards=True, edits=True, preferences=True, logprobs=False)


def checkpoint(version: str, lineage: str, learns: LearnedSignals | None = None, model: str = "m") -> Checkpoint:
    blob = BlobRef(uri="memory://none", sha256="0" * 64, size=1)
    return Checkpoint(
        time=datetime(2026, 1, 1, tzinfo=UTC), model=model, version=version, lineage=lineage, step=0, manifest=blob,
        learns=learns,
    )  # fmt: skip


def test_the_last_announcement_of_a_models_trainer_counts_for_versions_of_its_lineage(tmp_path: Path) -> None:
    async def refuse(_record: Record, error: Exception) -> None:
        raise error

    versions = KnownVersions(BusSettings(), "test", BlobStore(tmp_path.as_uri()), refuse)
    first, later, job = (f"m@{digit * 16}" for digit in "123")
    assert versions.signals_of("m", first) is None
    versions.checkpoint("m", checkpoint(first, "main", SFT))
    versions.checkpoint("m", checkpoint(job, "of a job"))
    versions.checkpoint("other", checkpoint(first, "main", KTO, model="other"))
    assert versions.signals_of("m", first) == SFT
    assert versions.signals_of("m", later) == SFT, "it may have been announced after this gateway read it"
    assert versions.signals_of("m", job) is None, "the trainer drops it as foreign"
    versions.checkpoint("m", checkpoint(first, "main", KTO))
    assert versions.signals_of("m", first) == KTO, "the trainer was started with another algorithm"


@pytest.mark.parametrize(
    "config", ["[]", "{", '"x"', "3", '{"text_config": []}', '{"vocab_size": "many"}', "[" * 99_999]
)
async def test_a_version_whose_configuration_is_damaged_has_no_known_vocabulary(
    blobs: BlobStore, tmp_path: Path, config: str
) -> None:
    async def refuse(_record: Record, error: Exception) -> None:
        raise error

    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {"model.safetensors": "weights", "tokenizer.json": "{}", "config.json": config}.items():
        (folder / name).write_text(text)
    fingerprint = Fingerprint(token_ids=(1, 2, 3), logprobs=(-0.5, -0.25))
    manifest, ref = store(blobs, folder, name="m", lineage="main", step=0, fingerprint=fingerprint)
    versions = KnownVersions(BusSettings(), "test", blobs, refuse)
    versions.checkpoint("m", checkpoint(manifest.version, "main").model_copy(update={"manifest": ref}))
    versions._checkpoints.loaded.set()
    versions._routings.loaded.set()
    known = await versions.models("m")
    assert "m" not in known.vocabularies
    assert manifest.version in known.versions["m"]
