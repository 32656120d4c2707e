"""What comes back from the scorer: whose an experience is, is read from the event and not found in its text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from headrace.topics import Range
from headrace_cli.replay.pipeline import Item, Pipeline
from headrace_cli.replay.program import Program
from headrace_cli.replay.report import Report
from headrace_cli.replay.request import make
from headrace_cli.supervisor.overrides import Overrides
from tests.support.account_events import experience


class Scorer:
    """What a scorer's filter writes."""

    def __init__(self, *values: bytes) -> None:
        self._values = values

    async def lines(self) -> AsyncIterator[tuple[str, bytes]]:
        for value in self._values:
            yield "experience", value


async def test_another_models_experience_is_left_out_whatever_its_text_says() -> None:
    ours = experience("E", "a").to_json()
    other = experience("F", "b").model_copy(update={"model": "other"}).to_json()
    newer = other[:-1] + b',"later":{"model":"m"}}'
    spaced = ours.replace(b'"model":"m"', b'"model": "m"')
    taken: list[bytes] = []

    async def sink(item: Item) -> None:
        taken.append(item.value)

    settings = {"trainer.base": "base", "trainer.model": "m", "trainer.lineage": "live"}
    request = make("again", Range("trajectories"), Overrides(None, settings, {}), "bus:9092")
    report = Report("again", "live", "trajectories")
    scorer = cast(Program, Scorer(ours, other, newer, spaced))
    await Pipeline(request, report, sink, lambda *_: None)._drain_scorer(scorer)
    assert taken == [ours, spaced]
    assert report.other_models == 2
