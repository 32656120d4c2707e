"""Tests of the overview page, of the console's readers of other services, and of live updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import jinja2
import pytest

from headrace_console.flow import Cause, Facts
from headrace_console.live import Changes
from headrace_console.pages.loop import flow_title
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.rows import Names
from headrace_console.sources.services import StackReport, parse_samples, read_left_out
from headrace_runtime.services import installed
from headrace_schemas import TrainingMetrics, Turn
from tests.support.account_events import trajectory, turn
from tests.unit.console.support import Stand

METRICS = """# HELP headrace_gateway_turns_total Turns captured
headrace_gateway_turns_total{model="a\\"b"} 3.0
headrace_gateway_turns_total{model="c"} 2.0
headrace_gateway_call_seconds_bucket{le="1"} 9.0
process_open_fds 12.0
headrace_gateway_in_progress 1e+06
"""


def test_samples_have_the_labels_and_values_of_the_page() -> None:
    samples = parse_samples(METRICS)
    assert samples == {
        "headrace_gateway_turns_total": [({"model": 'a"b'}, 3.0), ({"model": "c"}, 2.0)],
        "headrace_gateway_in_progress": [({}, 1e6)],
    }


def test_services_that_were_left_out_are_read_from_the_state_file(tmp_path: Path) -> None:
    assert read_left_out(tmp_path) == {}
    (tmp_path / "run").mkdir()
    state = tmp_path / "run" / "state.json"
    state.write_text('{"left_out": {"trainer": "trainer.base is not set"}}')
    assert read_left_out(tmp_path) == {"trainer": "trainer.base is not set"}
    state.write_text("[" * 100_000)
    assert read_left_out(tmp_path) == {}


async def test_the_loop_of_a_stack_that_is_away_says_so(tmp_path: Path) -> None:
    async with Stand(tmp_path, urls=dict.fromkeys(installed(), "http://127.0.0.1:1")) as stand:
        client = await stand.signed_in()
        page = await client.get("/")
        assert page.status_code == 200
        assert "The broker does not answer." in page.text
        assert "The registry does not answer at http://127.0.0.1:1" in page.text
        assert "Calls cannot be counted" in page.text
        fragment = await client.get("/", headers={"hx-request": "true"})
        assert "<h1>" not in fragment.text
        assert "The broker does not answer." in fragment.text


async def test_an_unexpected_error_has_a_page_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Stand(tmp_path) as stand:
        client = await stand.signed_in()

        async def report() -> StackReport:
            raise KeyError("secret detail")

        monkeypatch.setattr(stand.console._stack, "report", report)
        page = await client.get("/flow")
        assert page.status_code == 500
        assert "/flow: the console failed to make this page." in page.text
        assert '<nav aria-label="Pages">' in page.text
        assert "secret detail" not in page.text


async def test_templates_are_read_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Stand(tmp_path) as stand:
        client = await stand.signed_in()
        monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", None)
        for address in ("/sessions", "/rewards", "/review", "/nowhere"):
            assert (await client.get(address)).status_code in (200, 404)


@pytest.mark.parametrize(
    ("untrained_s", "cause", "title"),
    [
        (1.0, None, "What is not trained, and why"),
        (1.0, Cause("equal_rewards", "Equal.", ""), "What is not trained, and why"),
        (None, Cause("no_traffic", "No call.", ""), "Why nothing trains"),
        (None, None, "Is anything trained?"),
    ],
)
def test_the_heading_of_the_why_page_depends_on_training(
    untrained_s: float | None, cause: Cause | None, title: str
) -> None:
    assert flow_title(Facts(StackReport({}), untrained_s=untrained_s), cause) == title


async def test_the_why_page_explains_each_reason_of_dropped_turns(tmp_path: Path) -> None:
    events = [turn("a", purpose="eval"), turn("b"), trajectory("T", left_out={"b": "undelivered"})]
    async with Stand(tmp_path, urls=dict.fromkeys(installed(), "http://127.0.0.1:1")) as stand:
        async with stand.console.database.transaction() as tx:
            await Batch(tx, Names(), titles=True, day=1).apply(
                [LogEvent(event, 0, offset) for offset, event in enumerate(events)]
            )
        client = await stand.signed_in()
        page = (await client.get("/flow")).text
        assert 'href="/sessions?status=dropped&amp;evaluation=shown">eval</a>' in page
        assert "OpenAI(timeout=600)" in page
        assert "Why nothing trains" in page
        assert page.count('<td class="number">no answer</td>') == 10, "a service that is away has no number, not 0"


async def test_a_subscriber_gets_each_change_at_most_once_a_second() -> None:
    changes = Changes()
    stream = changes.stream()
    assert await anext(stream) == b"retry: 2000\n\n"
    for _ in range(3):
        changes.announce("loop")
    assert await anext(stream) == b"event: changed\ndata: loop 3\n\n"
    changes.announce("loop")
    began = asyncio.get_running_loop().time()
    assert await anext(stream) == b"event: changed\ndata: loop 4\n\n"
    assert asyncio.get_running_loop().time() - began >= 0.9
    changes.close()
    assert [message async for message in stream] == []
    assert not changes.is_watched


async def test_services_are_read_after_reports_of_the_trainer_alone_while_nobody_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Stand(tmp_path) as stand:
        readings, ticks = 0, 0

        async def report() -> StackReport:
            nonlocal readings
            readings += 1
            return StackReport({})

        async def sleep(_seconds: float) -> None:
            nonlocal ticks
            ticks += 1
            if ticks in (20, 30):
                stand.console._announce({Turn.topic if ticks == 20 else TrainingMetrics.topic})
            if ticks == 40:
                raise asyncio.CancelledError

        monkeypatch.setattr(stand.console._stack, "report", report)
        monkeypatch.setattr(stand.clock, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await stand.console.watch()
        assert (readings, ticks) == (2, 40), "once at the start, and once after the report"
