"""Tests of the pages of models, versions and rollouts with the real registry, and of decisions in its audit log."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from headrace_console.pages.rollouts import metric_rows
from headrace_registry.control import steps as steps_of_rollouts
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_registry.storage import audit
from headrace_runtime.http import web
from headrace_runtime.services import installed
from headrace_runtime.settings.sections import Common, ServiceSettings
from headrace_schemas.http.catalog import AuditEntry
from headrace_schemas.http.registry_api import RolloutState
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
        urls = {**dict.fromkeys(installed(), "http://127.0.0.1:1"), "registry": f"http://127.0.0.1:{port}"}
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
    monkeypatch.setattr(steps_of_rollouts, "fresh_salt", lambda: "salt")


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
    assert {row.name: row.verdict for row in metric_rows(rollout)} == {
        "reward": "shown to keep its margin",
        "tool_errors": "shown to be worse than its margin",
        "length": "not decided",
        "success": "shown to be better",
        "new": "not measured yet",
    }
