"""Pipeline of a replay: the model of an experience is read from the event and not searched in its text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from headrace.topics import Progress, Range
from headrace_operations.replay.journal import Journal, ReadRange
from headrace_operations.replay.partition_merge import PartitionMerge, PartitionReader
from headrace_operations.replay.pipeline import Item, Pipeline
from headrace_operations.replay.program import Program
from headrace_operations.replay.report import Report
from headrace_operations.replay.request import make
from headrace_operations.supervisor.overrides import Overrides
from headrace_schemas import Experience
from headrace_schemas.events.envelope import Envelope
from tests.support.account_events import experience


class Scorer:
    """Scorer program that writes the given experiences."""

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
    """On a topic that models share, time may cut two batches after the same record of this model."""
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
