"""Tests of the overview, of live updates, and of models, versions, rollouts and decisions with the real registry."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import jinja2
import pytest

from headrace_console.flow import Cause, Facts
from headrace_console.learning import describe_refusal
from headrace_console.live import Changes
from headrace_console.pages.loop import flow_title
from headrace_console.pages.rollouts import describe_evidence
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.rows import Names
from headrace_console.sources.services import StackReport, parse_samples, read_left_out
from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_registry.storage import audit
from headrace_runtime.http import web
from headrace_runtime.services import installed_services
from headrace_runtime.settings.sections import Common, ServiceSettings
from headrace_schemas import ModelEvent, TrainingMetrics, Turn
from headrace_schemas.http.catalog import AuditEntry
from headrace_schemas.http.registry_api import RolloutState
from tests.support.turns import START, trajectory, turn
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.rollout_traffic import Traffic, canary_settings, under_way

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


@contextlib.asynccontextmanager
async def opened(data_dir: Path, rig: Rig, *, read_only: bool = False) -> AsyncIterator[Stand]:
    """Open a console that reaches the REST API of the registry in `rig` over HTTP."""
    common = Common(data_dir=data_dir)
    changes = RegistryChanges(rig.processor, rig.lease, rig.model_controller.wake.set)
    api = RegistryApi(common, rig.database, rig.processor.clock, rig.replicas.values, changes)
    rollouts = RolloutApi(common, rig.settings.rollout, rig.database, changes)
    application = web.app({}, [*api.routes(), *rollouts.routes()])
    async with web.serve(application, ServiceSettings()) as port:
        urls = {**dict.fromkeys(installed_services(), "http://127.0.0.1:1"), "registry": f"http://127.0.0.1:{port}"}
        async with Stand(data_dir, read_only=read_only, urls=urls) as stand:
            yield stand


async def post(client: httpx2.AsyncClient, path: str, reason: str) -> httpx2.Response:
    fields = {"form_token": await form_token(client), "reason": reason}
    return await client.post(path, data=fields, headers=BY_PAGE)


async def audited(rig: Rig) -> AuditEntry:
    """Return the newest entry of the registry's audit log."""
    async with rig.database.transaction() as tx:
        return (await audit.read_entries(tx, None, None, 1))[0]


@pytest.fixture(autouse=True)
def _one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_of_rollouts, "new_salt", lambda: "salt")


def address(version: str) -> str:
    return "/models/" + version.replace("@", "/")


async def test_pages_show_models_versions_and_their_decisions(data_dir: Path) -> None:
    rig = Rig(data_dir)
    await rig.start()
    old, new = await rig.promote_in_turn(0, 1)
    async with opened(data_dir, rig) as stand:
        client = await stand.signed_in("viewer")
        listed = await client.get("/models")
        assert address(new) in listed.text
        model = await client.get(f"/models/{MODEL}")
        assert address(old) in model.text
        assert re.search(r"<td>\s*champion\s*</td>", model.text)
        for path in (address(new), address(new)[:-4]):
            version = await client.get(path)
            assert f"{new} took over" in version.text
            assert '<form method="post" action="/models/' not in version.text, "a viewer decides nothing"
        loop = await client.get("/")
        assert f'<h2><a href="/models/{MODEL}">' in loop.text
        unknown = [await client.get(f"/models/{name}") for name in ("nobody", MODEL + "/" + "f" * 12)]
        assert {reply.status_code for reply in unknown} == {404}
    await rig.database.close()


@pytest.mark.parametrize(("action", "phase"), [("stop", "hold"), ("promote", "champion"), ("rollback", "rolled_back")])
async def test_an_operator_ends_a_rollout_under_the_own_name_with_a_reason(
    data_dir: Path, action: str, phase: str
) -> None:
    rig = Rig(data_dir, settings=canary_settings())
    await rig.start()
    await rig.promote_in_turn(0)
    new = await under_way(rig)
    traffic = Traffic(rig, 1)
    for _ in range(2):
        await traffic.sessions(10)
        await traffic.advance(61)
    async with opened(data_dir, rig) as stand:
        client = await stand.signed_in("operator")
        path = re.findall(r'href="(/rollouts/[^"]+)"', (await client.get("/rollouts")).text)[0]
        page = await client.get(path)
        assert f"{new} has 1/2 of the traffic" in page.text
        assert "<svg" in page.text
        assert "no difference" in page.text
        assert (await client.get(f"{path}?metric=nothing")).status_code == 404
        assert (await (await stand.signed_in("reviewer")).get(path)).text.count("formaction") == 0
        refused = await post(await stand.signed_in("reviewer"), f"{path}/{action}", "because")
        assert refused.status_code == 403
        assert (await post(client, f"{path}/{action}", "  ")).status_code == 400
        assert (await post(client, f"{path}/explode", "because")).status_code == 404
        reply = await post(client, f"{path}/{action}", HOSTILE)
        assert (reply.status_code, reply.headers["location"]) == (303, path), reply.text
        entry = await audited(rig)
        assert (entry.who, entry.action, entry.version) == ("operator", f"rollout-{action}", new)
        assert entry.why == HOSTILE
        stand.clock.now_s += 2
        after = (await client.get(path)).text
        assert phase.replace("_", " ") in (await client.get("/rollouts")).text
        assert "<script>alert" not in after
        assert "\u202e" not in after
        assert "formaction" not in after, "it is over"
        assert (await post(client, f"{path}/{action}", "again")).status_code == 409
    await rig.database.close()


async def test_an_operator_promotes_and_withdraws_a_version(data_dir: Path) -> None:
    rig = Rig(data_dir)
    await rig.start()
    await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    async with opened(data_dir, rig) as stand:
        client = await stand.signed_in("operator")
        assert "Make it the next candidate" in (await client.get(address(new))).text
        found = await client.get("/find", params={"q": new.partition("@")[0]})
        assert found.headers["location"] == f"/models/{new.partition('@')[0]}"
        reply = await post(client, f"{address(new)}/promote", "it answers better")
        assert (reply.status_code, reply.headers["location"]) == (303, address(new)), reply.text
        entry = await audited(rig)
        assert (entry.who, entry.action, entry.why) == ("operator", "promote", "it answers better")
        assert (await post(client, f"{address(new)}/withdraw", "it lies")).status_code == 303
        assert (await audited(rig)).why == "it lies"
        assert await rig.state(new) == "withdrawn"
        stand.clock.now_s += 2
        page = (await client.get(address(new))).text
        assert f"{new} was withdrawn" in page
        assert "it lies" in page
    async with opened(data_dir, rig, read_only=True) as stand:
        client = await stand.signed_in("operator")
        refused = await post(client, f"{address(new)}/promote", "because")
        assert (refused.status_code, "read-only" in refused.text) == (403, True)
    await rig.database.close()


def test_a_verdict_follows_the_interval_and_the_margin() -> None:
    values = {
        "id": "r",
        "model": "m",
        "version": "m@0123456789ab",
        "control": "m@0123456789ac",
        "kind": "canary",
        "phase": "canary",
        "stage": 0,
        "stages": ("1/2",),
        "share": "1/2",
        "unit": "session",
        "number": 1,
        "reason": "",
        "began_at": "2026-11-26T07:00:00Z",
        "changed_at": "2026-11-26T07:00:00Z",
        "watched_s": 1.0,
        "margins": {"reward": 0.05, "tool_errors": 0.05, "length": 10.0},
        "higher_is_better": {"reward": True, "tool_errors": False, "length": False, "success": True, "new": True},
    }
    intervals = {"reward": (-0.04, 0.02), "tool_errors": (0.06, 0.09), "length": (-20.0, 30.0), "success": (0.01, 0.2)}
    statistics = {
        f"{name}.{end}": value
        for name, ends in intervals.items()
        for end, value in zip(("lower", "upper"), ends, strict=True)
    }
    rollout = RolloutState.model_validate({**values, "statistics": statistics})
    assert {name: describe_evidence(rollout, name) for name in rollout.higher_is_better} == {
        "reward": "shown to keep its margin",
        "tool_errors": "shown to be worse than its margin",
        "length": "not decided",
        "success": "shown to be better",
        "new": "not measured yet",
    }


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
    async with Stand(tmp_path, urls=dict.fromkeys(installed_services(), "http://127.0.0.1:1")) as stand:
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
    async with Stand(tmp_path, urls=dict.fromkeys(installed_services(), "http://127.0.0.1:1")) as stand:
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


CHAMPION_NUMBERS = {"tasks": 253.0, "difference": -0.1, "standard_error": 0.02, "margin": 0.05}
ANCHOR_NUMBERS = {"anchor_difference": 0.01, "anchor_standard_error": 0.05, "anchor_margin": 0.03}
MINIMUM = {"minimum_score": 0.4, "minimum_difference": -0.08, "minimum_standard_error": 0.03, "minimum_margin": 0.05}
THUMB_NUMBERS = {"thumb.difference": -0.12, "thumb.lower": -0.2, "thumb.upper": -0.05, "candidate_units": 60.0}
CHAMPION = "m@000000000001"


@pytest.mark.parametrize(
    ("reason", "numbers", "sentence"),
    [
        (
            f"inferior to {CHAMPION}",
            CHAMPION_NUMBERS | ANCHOR_NUMBERS,
            "Refused by the margin against the champion: difference -0.10 ± 0.04 after 253 tasks, limit -0.05.",
        ),
        (
            "undecided after 253 tasks (gate.tasks_max): not shown to be better than the anchor m@000000000000 - 0.03",
            CHAMPION_NUMBERS | ANCHOR_NUMBERS,
            "Refused by the margin against the anchor: difference +0.01 ± 0.10 after 253 tasks, limit -0.03. The "
            "interval had to lie beyond the limit before gate.tasks_max was reached, and it did not.",
        ),
        (
            "inferior to gate.minimum_score = 0.4",
            CHAMPION_NUMBERS | MINIMUM,
            "Refused by the minimum score 0.4 (registry.gate.minimum_score): difference -0.08 ± 0.06 after 253 tasks, "
            "limit -0.05.",
        ),
        (
            "harm: thumb at maturity",
            THUMB_NUMBERS | {"thumb.harm_limit": -0.01},
            "Refused by the guardrail thumb: difference -0.120 (-0.200 to -0.050) after 60 units, limit -0.01.",
        ),
        (
            "60 units with the candidate and 20 with its control are not an even split: units were lost",
            {"candidate_units": 60, "control_units": 20, "sample_ratio_log_evidence": 7, "sample_ratio_log_limit": 4.6},
            "Refused by the split of the arms: 60 units of the candidate, 20 of its control; log evidence that they "
            "are not even 7.00, limit 4.60.",
        ),
        (
            "undecided after 60 units (units_max = 60): thumb not shown to be harmless enough for stage 2; thumb, arms "
            "of one size not shown to be good enough; no success shown",
            THUMB_NUMBERS
            | {"control_units": 40.0, "uneven_limit": 0.15, "thumb.stage_2_limit": -0.3}
            | {"thumb.limit": -0.1, "speed.success_limit": 0.0},
            "Refused by the guardrail thumb before stage 2: difference -0.120 (-0.200 to -0.050) after 60 units, limit "
            "-0.3 and by the guardrail thumb: difference -0.120 (-0.200 to -0.050) after 60 units, limit -0.1 and by "
            "the split of the arms: 60 units of the candidate, 40 of its control, difference +20.0% of both, limit "
            "±15.0% and by the success speed: no figure, limit +0. The interval had to lie beyond the limit before "
            "units_max = 60 was reached, and it did not.",
        ),
        ("the gate failed: exit status 3", {}, "Refused: the gate failed: exit status 3."),
    ],
)
def test_a_refusal_begins_with_the_rule_its_figure_and_its_limit(
    reason: str, numbers: dict[str, float], sentence: str
) -> None:
    event = ModelEvent(
        decision_id="r", time=START, model="m", version="m@000000000002", decision="rejected", previous=CHAMPION,
        reason=reason, statistics=numbers,
    )  # fmt: skip
    assert describe_refusal(event) == sentence
    assert not describe_refusal(event.model_copy(update={"decision": "promoted"}))
