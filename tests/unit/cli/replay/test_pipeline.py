"""Tests of the replay pipeline.

The model of an experience is a field of the event and is not searched for in its text. The merged order of partitions
depends on timestamps or on the journal of a lineage, and not on read speed. A journal has an order, cuts and gaps. An
invalid replay request is refused before any work, with a remedy.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.topics import Progress, Range
from headrace_operations.replay.partition_merge import (
    Journal,
    PartitionMerge,
    PartitionReader,
    ReadRange,
    build_journal,
)
from headrace_operations.replay.pipeline import Item, Pipeline
from headrace_operations.replay.program import (
    Program,
    TrainingReports,
    _last_lines,
    failure_reason,
    follow,
    start_program,
)
from headrace_operations.replay.request import Report, Request, make
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.services import ServiceInfo
from headrace_schemas import BatchRecord, Experience, PartitionRead, TrainingMetrics, TrainingOutcome
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.programs import DryRunBatch, DryRunLine
from tests.support.turns import START, experience


class Scorer:
    """Scorer program that writes the configured experiences."""

    def __init__(self, *values: bytes) -> None:
        self._values = values

    async def lines(self) -> AsyncIterator[tuple[str, bytes]]:
        for value in self._values:
            yield "experience", value


async def test_experiences_of_other_models_are_left_out() -> None:
    own_event = experience("E", "a").to_json()
    other = experience("F", "b").model_copy(update={"model": "other"}).to_json()
    with_later_model = other[:-1] + b',"later":{"model":"m"}}'
    spaced = own_event.replace(b'"model":"m"', b'"model": "m"')
    values: list[bytes] = []

    async def sink(item: Item) -> None:
        values.append(item.value)

    settings = {"trainer.base": "base", "trainer.model": "m", "trainer.lineage": "live"}
    request = make("again", Range("trajectories"), Overrides(None, settings, {}), "bus:9092")
    report = Report("again", "live", "trajectories")
    scorer = cast(Program, Scorer(own_event, other, with_later_model, spaced))
    await Pipeline(request, report, sink, lambda *_: None)._drain_scorer(scorer)
    assert values == [own_event, spaced]
    assert report.other_models == 2


class Message:
    """The fields of a `ConsumerRecord` that the pipeline reads."""

    partition, timestamp, key = 0, 0, None

    def __init__(self, offset: int, event: Experience) -> None:
        envelope = Envelope.of(event, "test")
        self.offset, self.value, self.headers = offset, event.to_json(), tuple(envelope.headers())


@pytest.mark.parametrize("between", [0, 1, 3])
async def test_cuts_after_experiences_of_other_models_are_kept(between: int) -> None:
    """On a topic that several models share, a batch may be cut by time after a record of another model."""
    own_events = [experience(name, "a") for name in "EFG"]
    other = experience("X", "b").model_copy(update={"model": "other"})
    stream = [*own_events[:2], *[other] * between, own_events[2]]

    async def records() -> AsyncIterator[Any]:
        for offset, event in enumerate(stream):
            yield Message(offset, event)

    reader = PartitionReader(records(), Progress())
    await reader.advance()
    first, second = ((1,), (1,)) if between else ((1, 1), ())
    names = (("a",), ("b",)) if between else (("a", "b"), ())
    ranges = (ReadRange(0, 2, first, names[0]), ReadRange(0, 2 + between, second, names[1]))
    items: list[tuple[bytes, tuple[int, ...], tuple[str, ...]]] = []

    async def sink(item: Item) -> None:
        items.append((item.value, item.cuts, item.left_out))

    request = make(
        "again", Range("experiences"), Overrides(None, {"trainer.base": "base", "trainer.model": "m"}, {}), "bus:9092"
    )
    report = Report("again", "live", "experiences", cut="recorded")
    await Pipeline(request, report, sink, lambda *_: None).run(PartitionMerge({0: reader}), Journal(ranges, ()))
    last = (own_events[1].to_json(), (1, 1), ("a", "b"))
    assert items == [(own_events[0].to_json(), (), ()), last, (own_events[2].to_json(), (), ())]


@dataclass(frozen=True)
class MergedMessage:
    """The fields of a `ConsumerRecord` that the merge reads."""

    partition: int
    offset: int
    timestamp: int


async def merge(*partitions: list[MergedMessage], delays: random.Random | None = None) -> PartitionMerge:
    async def records(messages: list[MergedMessage]) -> AsyncIterator[Any]:
        for message in messages:
            for _ in range(delays.randrange(3) if delays else 0):
                await asyncio.sleep(0)
            yield message

    readers = {number: PartitionReader(records(messages), Progress()) for number, messages in enumerate(partitions)}
    for reader in readers.values():
        await reader.advance()
    return PartitionMerge(readers)


def log(partition: int, *timestamps: int) -> list[MergedMessage]:
    return [MergedMessage(partition, offset, timestamp) for offset, timestamp in enumerate(timestamps)]


async def positions_of(records: AsyncIterator[Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(merged.record.partition, merged.record.offset, merged.cuts) async for merged in records]


async def test_by_time_keeps_the_order_of_each_partition() -> None:
    positions = await positions_of((await merge(log(0, 1, 5, 2), log(1, 1, 3))).in_time_order())
    assert positions == [(0, 0, ()), (1, 0, ()), (1, 1, ()), (0, 1, ()), (0, 2, ())]


@pytest.mark.parametrize("seed", range(5))
async def test_the_order_does_not_depend_on_speed(seed: int) -> None:
    generator = random.Random(seed)
    logs = [log(number, *(generator.randrange(50) for _ in range(30))) for number in range(3)]
    without_delays = await positions_of((await merge(*logs)).in_time_order())
    with_delays = await positions_of((await merge(*logs, delays=generator)).in_time_order())
    assert without_delays == with_delays
    assert len(without_delays) == 90


async def test_as_read_yields_cuts_and_then_the_remaining_records() -> None:
    ranges = [ReadRange(1, 2), ReadRange(0, 1, (3, 2)), ReadRange(1, 3), ReadRange(7, 9), ReadRange(0, 1)]
    positions = await positions_of((await merge(log(0, 9, 9, 4), log(1, 8, 8, 8, 2))).in_recorded_order(ranges))
    assert positions == [
        (1, 0, ()), (1, 1, ()), (0, 0, (3, 2)), (1, 2, ()), (1, 3, ()), (0, 1, ()), (0, 2, ()),
    ]  # fmt: skip


DIGEST = "0" * 64
VERSION = "m@0123456789abcdef"


def reads(*pairs: tuple[int, int]) -> tuple[PartitionRead, ...]:
    return tuple(PartitionRead(partition=partition, until=until) for partition, until in pairs)


def account(number: int, *batches: BatchRecord, read: tuple[PartitionRead, ...] = (), **fields: Any) -> TrainingMetrics:
    defaults = {"time": START, "model": "m", "lineage": "main", "step": number, "account": number}
    return TrainingMetrics.model_validate({**defaults, "batches": batches, "read": read, **fields})


def batch(experiences: int, *pairs: tuple[int, int]) -> BatchRecord:
    return BatchRecord(step=1, experiences=experiences, digest=DIGEST, read=reads(*pairs))


def test_a_journal_has_ranges_and_cuts_in_order() -> None:
    first = account(1, batch(4, (0, 3), (1, 2)), batch(2, (0, 5)), read=reads((1, 4)))
    accounts = [account(0), account(2, batch(3, (1, 6), (0, 7))), first, first]
    journal = build_journal([*accounts, account(9, lineage="other"), account(1, model="n")], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (
        ReadRange(0, 3),
        ReadRange(1, 2, (4,)),
        ReadRange(0, 5, (2,)),
        ReadRange(1, 4),
        ReadRange(1, 6),
        ReadRange(0, 7, (3,)),
    )
    assert [batch_record.experiences for batch_record in journal.batches] == [4, 2, 3]


def test_incomplete_journals_have_a_gap() -> None:
    complete = [account(0), account(1, batch(1, (0, 1)))]
    assert build_journal(complete, "m", "main").gap is None
    assert "has no report of model m in lineage else" in str(build_journal(complete, "m", "else").gap)
    assert "has not all reports of lineage main" in str(build_journal(complete[1:], "m", "main").gap)
    assert "has not all reports of lineage main" in str(build_journal([complete[0], account(2)], "m", "main").gap)
    old = account(2, verdicts=(TrainingOutcome(experience_id="e", revision=0, turn_ids=()),))
    assert "before batches were recorded" in str(build_journal([*complete, old], "m", "main").gap)
    assert "cut a batch before it read a record" in str(build_journal([account(0, batch(1))], "m", "main").gap)


def test_a_batch_cut_by_time_follows_earlier_reads() -> None:
    journal = build_journal([account(0), account(1, read=reads((0, 2), (1, 1))), account(2, batch(3))], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (ReadRange(0, 2), ReadRange(1, 1, (3,)))


def test_two_batches_may_be_cut_after_the_same_record() -> None:
    journal = build_journal([account(0), account(1, batch(4, (0, 9)), batch(3)), account(2, batch(2))], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (ReadRange(0, 9, (4, 3, 2)),)


def test_experiences_left_out_of_a_batch_count_in_its_cut() -> None:
    named = batch(2, (0, 9)).model_copy(update={"left_out": ("e1", "e4")})
    journal = build_journal(
        [account(0), account(1, named, batch(3), version=VERSION), account(2, batch(2))], "m", "main"
    )
    assert journal.ranges == (ReadRange(0, 9, (4, 3, 2), ("e1", "e4")),)
    assert [record.left_out for record in journal.recorded] == [("e1", "e4"), (), ()]


def test_recorded_batches_state_whether_they_trained_and_published() -> None:
    """Batches are marked as trained or published.

    A batch with a non-finite gradient keeps the step of the previous batch. A version belongs to the last batch before
    it.
    """
    records = [batch(1, (0, 1)).model_copy(update={"step": step}) for step in (1, 2, 2, 3, 3)]
    accounts = [account(0, version=VERSION), account(1, *records[:2], version=VERSION), account(2, *records[2:4])]
    journal = build_journal([*accounts, account(3, records[4]), account(4, version=VERSION)], "m", "main")
    assert [record.trained for record in journal.recorded] == [True, True, False, True, False]
    assert [record.published for record in journal.recorded] == [False, True, False, False, True]


def request(lineage: str = "again", topic: str = "experiences", **options: Any) -> Request:
    settings = {"trainer.base": "base", "trainer.lineage": "live", **options.pop("settings", {})}
    topic_range = options.pop("topic_range", Range(topic))
    return make(lineage, topic_range, Overrides(None, settings, {}), "bus:9092", **options)


def test_the_programs_get_the_lineage_and_topic_of_the_replay() -> None:
    replay_request = request(settings={"trainer.model": "m"})
    assert (replay_request.of, replay_request.model, replay_request.topic) == ("live", "m", "replay-again-experiences")
    environ = replay_request.environ(lineage="again", job={"until_end": True})
    assert environ["HEADRACE_TRAINER__LINEAGE"] == '"again"'
    assert environ["HEADRACE_TRAINER__JOB"] == "{until_end = true}"
    assert environ["HEADRACE_TRAINER__BASE"] == '"base"'
    assert environ["HEADRACE_BUS__ADDRESS"] == '"bus:9092"'
    assert int(environ["HEADRACE_SCORER__FUNCTION_WORKERS"]) >= 2


def test_a_replay_is_complete_only_with_every_record() -> None:
    assert request(topic_range=Range("experiences", keys=frozenset())).is_complete
    assert not request(topic_range=Range("experiences", from_offset=0, to_offset=9)).is_complete
    assert not request(topic_range=Range("experiences", partitions=(1,))).is_complete
    assert not request(versions=frozenset({"m@0123456789ab"})).is_complete


@pytest.mark.parametrize(
    ("lineage", "options", "message"),
    [
        ("live", {}, "'live': is the live lineage; choose another name"),
        ("old", {"of": "old"}, "choose another name for the replay"),
        ("a/b", {}, "must have 1 to 100 letters, digits"),
        ("again", {"settings": {"trainer.base": ""}}, r"trainer.base is not set: .*--config FILE"),
        ("again", {"judge": True}, "judge.endpoint.base_url is not set"),
    ],
)
def test_refusals_name_the_remedy(lineage: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request(lineage, **options)


def test_the_last_error_line_of_a_program_is_the_failure_reason() -> None:
    assert (
        failure_reason(["noise", "headrace scorer: scorer.functions = 3: no", ""], "scorer")
        == "scorer: scorer.functions = 3: no"
    )
    line = json.dumps({"event": "refused_to_start", "error": "trainer.base: is not a folder"})
    assert failure_reason(["{", line], "trainer") == "trainer: trainer.base: is not a folder"
    assert failure_reason([], "trainer") == ""


async def test_the_error_of_a_failed_program_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").touch()
    (tmp_path / "broken" / "replay.py").write_text("import sys; sys.exit('headrace scorer: the remedy')")
    monkeypatch.setattr(
        "headrace_operations.replay.program.installed",
        lambda: {"scorer": ServiceInfo(module="broken", summary="Fails.")},
    )
    async with start_program(
        "scorer", {"PYTHONPATH": str(tmp_path), "PATH": str(Path(sys.executable).parent)}
    ) as program:
        with pytest.raises(HeadraceError, match="scorer: the remedy"):
            await anext(program.lines())


async def test_a_missing_service_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_operations.replay.program.installed", dict)
    with pytest.raises(UsageError, match=r"the judge service is not installed.*pip install headrace-judge"):
        async with start_program("judge", {}):
            pytest.fail("there is nothing to start")


@pytest.mark.parametrize(
    ("original", "replayed", "equal", "same"),
    [
        ("abc", "abc", 3, True),
        ("abc", "ab", 2, False),
        ("abc", "axc", 1, False),
        ("", "a", 0, False),
        ("ab", "abc", 2, False),
    ],
)
def test_batches_are_compared_in_order(original: str, replayed: str, equal: int, same: bool) -> None:
    report = Report("again", "main", "experiences")
    batches = tuple(DryRunBatch(experiences=1, digest=digit * 64) for digit in replayed.replace("x", "e"))
    report.training = DryRunLine(batches=batches)
    report.compare([digit * 64 for digit in original])
    assert (report.batches_equal, report.same) == (equal, same)


async def test_invalid_records_do_not_stop_the_reports_of_a_training() -> None:
    """Everybody who may write to the bus may write to the topics of a replay."""
    valid = TrainingMetrics(time=START, model="m", lineage="main", step=0)
    values = [b"{", b"[]", b"\xff", None, b'{"time": 1e999}', valid.to_json()]

    class Polluted:
        async def records(self, _range: Range) -> AsyncIterator[SimpleNamespace]:
            for offset, value in enumerate(values):
                yield SimpleNamespace(offset=offset, value=value, headers=())

    reports = TrainingReports()
    await follow(Polluted(), TrainingMetrics.topic, reports)  # type: ignore[arg-type]
    assert reports.seen == {valid.event_id}
    assert reports.offset == len(values)


@pytest.mark.parametrize("size", [0, 10, 10_000_000])
def test_only_the_end_of_the_log_of_a_program_is_read(size: int) -> None:
    with tempfile.TemporaryFile() as log:
        log.write(b"x" * 99 + b"\n")
        log.write(b"y" * size + b"\nheadrace scorer: the reason\n")
        lines = _last_lines(log)
    assert failure_reason(lines, "scorer") == "scorer: the reason"
    assert sum(map(len, lines)) < 100_000
