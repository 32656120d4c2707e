"""Tests of the REST interface of models: permissions, changes and refusals.

Invalid JSON values at each position of each route are refused with the name of the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import pytest_asyncio
from sqlalchemy import text

from headrace_registry.pages.http import RegistryChanges
from headrace_registry.pages.registry_api import RegistryApi
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings
from headrace_schemas.http.registry_api import ModelList, ModelState, VersionList
from tests.support.hostile_json import TEXTS, kinds_everywhere
from tests.unit.registry.conftest import CatalogBench
from tests.unit.registry.rig import MODEL, Rig, loaded


def client(rig: Rig, key: str = "") -> httpx2.AsyncClient:
    common = Common(data_dir=Path("unused"), security=SecuritySettings(internal_key=key))
    changes = RegistryChanges(rig.processor, rig.lease, rig.model_controller.wake.set)
    api = RegistryApi(common, rig.database, rig.processor.clock, rig.replicas.values, changes)
    transport = httpx2.ASGITransport(web.app({}, api.routes()))
    return httpx2.AsyncClient(transport=transport, base_url="http://registry")


@pytest_asyncio.fixture
async def http(rig: Rig) -> AsyncIterator[httpx2.AsyncClient]:
    async with client(rig) as http_client:
        yield http_client


def error(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_api_lists_models_and_versions_with_their_decisions(rig: Rig, http: httpx2.AsyncClient) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    listed = ModelList.model_validate_json((await http.get("/v1/models")).content)
    assert [model.id for model in listed.data] == [MODEL]
    model = ModelState.model_validate_json((await http.get(f"/v1/models/{MODEL}")).content)
    assert (model.champion, model.previous, model.candidate) == (new, old, None)
    assert model.revision == rig.routing.revision
    version_list = VersionList.model_validate_json((await http.get(f"/v1/models/{MODEL}/versions")).content)
    assert [version.id for version in version_list.data] == [new, old]
    assert [event.decision for event in version_list.data[0].decisions] == [
        "registered",
        "probed",
        "promoted",
        "evaluated",
    ]
    assert version_list.data[0].decisions[-1].statistics["score"] == 0.5
    assert (model.anchor, model.trials) == (old, 1), "as good as the first one is not better"
    limited = await http.get(f"/v1/models/{MODEL}/versions", params={"limit": "1"})
    assert len(VersionList.model_validate_json(limited.content).data) == 1


async def test_api_reports_trouble_of_a_model_that_is_not_served(rig: Rig, http: httpx2.AsyncClient) -> None:
    async def trouble() -> str | None:
        return ModelState.model_validate_json((await http.get(f"/v1/models/{MODEL}")).content).trouble

    base = await rig.checkpoint(0)
    await rig.ticks()
    assert "no replica is alive" in str(await trouble())
    rig.report("r1", loaded(base, "failed", error="tensor model.norm.weight is missing"))
    assert "replica r1: tensor model.norm.weight is missing" in str(await trouble())
    await rig.ticks()
    refused = str(await trouble())
    assert refused.startswith(f"no version serves, {base} was rejected: ")
    assert "tensor model.norm.weight is missing" in refused
    (champion,) = await rig.promote_in_turn(1)
    assert await trouble() is None
    rig.report("r1", loaded(champion, passed=False, error="probe refused"))
    assert await trouble() == f"no replica serves the champion {champion}: replica r1: probe refused"
    assert ModelList.model_validate_json((await http.get("/v1/models")).content).data[0].trouble == await trouble()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/models/nobody", None, 404, "model_not_found"),
        ("GET", "/v1/models/nobody/versions", None, 404, "model_not_found"),
        ("GET", "/v1/models/m/versions?limit=0", None, 400, "invalid_request"),
        ("GET", "/v1/models/m/versions?limit=x", None, 400, "invalid_request"),
        ("POST", "/v1/models/nobody/rollback", {}, 404, "model_not_found"),
        ("POST", "/v1/models/m/rollback", {}, 409, "no_previous"),
        ("POST", "/v1/models/m/promote", {}, 400, "invalid_request"),
        ("POST", "/v1/models/m/promote", {"version": "m@0123456789ab"}, 404, "version_not_found"),
        ("POST", "/v1/models/m/promote", {"version": "m@0123456789ab", "farce": True}, 400, "invalid_request"),
        ("POST", "/v1/models/m/withdraw", {"version": "nonsense"}, 400, "invalid_request"),
        ("POST", "/v1/models/m/withdraw", {"reason": "x" * 70_000}, 413, "body_too_large"),
    ],
)
async def test_api_refuses_invalid_requests_with_code_and_field(
    rig: Rig, http: httpx2.AsyncClient, method: str, path: str, body: object, status: int, code: str
) -> None:
    await rig.checkpoint(0)
    assert error(await http.request(method, path, json=body)) == (status, code)
    assert rig.decided() == [("registered", (await _only(http)))]


async def _only(http: httpx2.AsyncClient) -> str:
    version_list = VersionList.model_validate_json((await http.get(f"/v1/models/{MODEL}/versions")).content)
    return version_list.data[0].id


async def test_rollback_withdraws_the_champion(rig: Rig, http: httpx2.AsyncClient) -> None:
    first, second, third = await rig.promote_in_turn(0, 1, 2)
    answer = await http.post(f"/v1/models/{MODEL}/rollback", json={"reason": "users complain"})
    assert answer.status_code == 200
    assert answer.json()["champion"] == second
    assert rig.routing.aliases == {"champion": second, "previous": first}
    assert rig.routing.withdrawn == (third,)
    assert third not in {served.version for served in rig.routing.serve}
    event = rig.last("rolled_back")
    assert (event.version, event.previous, event.reason) == (third, second, "users complain")
    rig.follow()
    assert (await http.post(f"/v1/models/{MODEL}/rollback")).json()["champion"] == first, "an empty body does"
    assert rig.routing.aliases == {"champion": first}
    assert error(await http.post(f"/v1/models/{MODEL}/rollback")) == (409, "no_previous")


async def test_rollback_never_selects_a_withdrawn_version(rig: Rig, http: httpx2.AsyncClient) -> None:
    first, second, _ = await rig.promote_in_turn(0, 1, 2)
    assert (await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": first})).status_code == 200
    rig.follow()
    assert (await http.post(f"/v1/models/{MODEL}/rollback")).json()["champion"] == second
    assert rig.routing.aliases == {"champion": second}, "the one before it is withdrawn"
    assert first in rig.routing.withdrawn


async def test_rollback_is_refused_without_a_replica_of_the_previous_version(
    rig: Rig, http: httpx2.AsyncClient
) -> None:
    _, new = await rig.promote_in_turn(0, 1)
    rig.report("r1", loaded(new))
    assert error(await http.post(f"/v1/models/{MODEL}/rollback")) == (409, "previous_not_ready")
    assert rig.routing.champion == new


async def test_forced_promotion_skips_the_gate_but_not_the_probe(rig: Rig, http: httpx2.AsyncClient) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = {"t1": 0.0, "t2": 0.0}
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    rig.report("r1", loaded(old))
    answer = await http.post(f"/v1/models/{MODEL}/promote", json={"version": new, "force": True})
    assert answer.status_code == 202
    await rig.ticks()
    assert rig.routing.champion == old, "no replica has it yet"
    rig.clock.elapsed_s += 1
    rig.follow()
    await rig.ticks()
    assert rig.routing.champion == new
    assert rig.last("promoted").reason == "an operator promoted it past the gate"


async def test_promotion_through_the_gate_repeats_the_trial(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.promote_in_turn(0)
    skipped, newest = await rig.checkpoint(1), await rig.checkpoint(2)
    async with rig.running():
        await rig.until(lambda: ("promoted", newest) in rig.decided())
        assert await rig.state(skipped) == "skipped"
        assert (await http.post(f"/v1/models/{MODEL}/promote", json={"version": skipped})).status_code == 202
        await rig.until(lambda: ("promoted", skipped) in rig.decided())
    assert skipped in rig.gate.players
    again = await http.post(f"/v1/models/{MODEL}/promote", json={"version": skipped})
    assert error(again) == (409, "already_champion")


async def test_forced_promotion_of_the_candidate_ends_its_gate_run(rig: Rig, http: httpx2.AsyncClient) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.open.clear()
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: rig.gate.runs == [{old}, {old, new}])
        await http.post(f"/v1/models/{MODEL}/promote", json={"version": new, "force": True})
        await rig.until(lambda: ("promoted", new) in rig.decided())


async def test_withdrawal_of_the_candidate_ends_its_gate_run(rig: Rig, http: httpx2.AsyncClient) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.open.clear()
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: rig.gate.runs == [{old}, {old, new}])
        answer = await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": new, "reason": "leaks"})
        assert answer.status_code == 200
        await rig.until(lambda: rig.gate.cancelled == [{old, new}])
    assert rig.routing.withdrawn == (new,)
    assert [served.version for served in rig.routing.serve] == [old]
    assert rig.last("withdrawn").reason == "leaks"
    assert (await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": new})).status_code == 200
    assert len([d for d in rig.decided() if d[0] == "withdrawn"]) == 1, "once is enough"


async def test_withdrawal_is_undone_by_force_only(rig: Rig, http: httpx2.AsyncClient) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    assert error(await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": new})) == (409, "is_champion")
    await http.post(f"/v1/models/{MODEL}/withdraw", json={"version": old})
    assert rig.routing.aliases == {"champion": new}
    assert error(await http.post(f"/v1/models/{MODEL}/promote", json={"version": old})) == (409, "withdrawn")
    async with rig.running():
        await http.post(f"/v1/models/{MODEL}/promote", json={"version": old, "force": True})
        await rig.until(lambda: rig.routing.champion == old)
    assert rig.routing.withdrawn == ()


async def test_forced_promotion_refuses_another_tokenizer(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.promote_in_turn(0)
    other = await rig.checkpoint(1, tokenizer="c")
    answer = await http.post(f"/v1/models/{MODEL}/promote", json={"version": other, "force": True})
    assert error(answer) == (409, "incompatible_version")


async def test_api_requires_the_internal_key_on_every_page(rig: Rig) -> None:
    await rig.promote_in_turn(0, 1)
    async with client(rig, "secret") as http:
        path = f"/v1/models/{MODEL}/rollback"
        assert error(await http.post(path)) == (401, "invalid_api_key")
        assert error(await http.post(path, headers={"Authorization": "Bearer wrong"})) == (401, "invalid_api_key")
        assert error(await http.get("/v1/models")) == (401, "invalid_api_key")
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 200
        assert (await http.post(path, headers={"Authorization": "Bearer secret"})).status_code == 200


async def test_standby_answers_reads_and_refuses_changes(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.promote_in_turn(0, 1)
    await rig.lease.release()
    assert (await http.get("/v1/models")).status_code == 200
    assert error(await http.post(f"/v1/models/{MODEL}/rollback")) == (503, "not_leader")


WHY = {"why": "because"}
REASON = {"reason": "because"}
VERSION = f"{MODEL}@0123456789ab"
BLOB = {"uri": "memory://manifest", "sha256": "0" * 64, "size": 1}
BODIES: dict[str, dict[str, Any]] = {
    "models/{}/promote": {"version": VERSION, "force": True},
    "models/{}/rollback": REASON,
    "models/{}/withdraw": {"version": VERSION, **REASON},
    "models/{}/pin": {"version": VERSION, **REASON},
    "models/{}/unpin": REASON,
    "models/{}/pause": REASON,
    "models/{}/resume": REASON,
    "models/{}/stop": REASON,
    "models/{}/register": {"manifest": BLOB, "label": "v1.0", "serve": False, **WHY},
    "models/{}/serve": {"version": VERSION, **WHY},
    "models/{}/unserve": {"version": VERSION, **WHY},
    "models/{}/aliases": {"moves": {"best": {"version": VERSION, "expected": None}}, **WHY},
    "models/{}/retire": {"version": VERSION, **WHY},
    "models/{}/tags": {"version": VERSION, "add": ["a"], "remove": ["b"], **WHY},
    "models/{}/notes": {"version": VERSION, "text": "fine"},
    "models/{}/rollouts": {"version": VERSION, "kind": "canary", "share": "1/2", **REASON},
    "rollouts/{}/stop": REASON,
    "rollouts/{}/promote": REASON,
    "rollouts/{}/rollback": REASON,
    "garbage": {"dry_run": True, **WHY},
}
READS = (
    "models/{}", "models/{}/versions", "models/{}/versions?limit={}", "models/{}/notes?version={}", "versions/{}",
    "versions/m@{}", "audit?model={}", "audit?before={}", "rollouts?model={}", "rollouts/{}", "rollouts?limit={}",
)  # fmt: skip
EXPECTED = {200, 201, 202, 307, 400, 404, 409, 413, 422}


@pytest_asyncio.fixture
async def pages(data_dir: Path, database_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of all pages of a registry with two versions of `MODEL`."""
    rig = Rig(data_dir, database_url)
    await rig.start()
    await rig.promote_in_turn(0, 1)
    changes = RegistryChanges(rig.processor, rig.lease, rig.model_controller.wake.set)
    rollouts = RolloutApi(Common(data_dir=Path("unused")), rig.settings.rollout, rig.database, changes)
    async with CatalogBench(rig, more=rollouts.routes()).http as http:
        yield http
    if not rig.database.sqlite:
        async with rig.database.transaction() as tx:
            await tx.execute(text("DROP SCHEMA registry CASCADE"))
    await rig.database.close()


def check(answer: httpx2.Response, about: object) -> int:
    assert answer.status_code in EXPECTED, (str(about)[:1000], answer.text)
    return answer.status_code


@pytest.mark.parametrize("path", BODIES)
async def test_api_handles_values_of_every_json_type(pages: httpx2.AsyncClient, path: str) -> None:
    statuses: Counter[int] = Counter()
    for body in kinds_everywhere(BODIES[path]):
        answer = await pages.post(f"/v1/{path.format(MODEL)}", json=body)
        statuses[check(answer, body)] += 1
    assert statuses[400] > 10, statuses


@pytest.mark.parametrize("path", BODIES)
async def test_api_handles_every_text(pages: httpx2.AsyncClient, path: str) -> None:
    for hostile in TEXTS:
        for name in BODIES[path]:
            answer = await pages.post(f"/v1/{path.format(MODEL)}", json={**BODIES[path], name: hostile})
            check(answer, (name, hostile))
        if hostile and "{}" in path:
            check(await pages.post(f"/v1/{path.format(quote(hostile, safe=''))}", json=BODIES[path]), hostile)


@pytest.mark.parametrize("path", READS)
async def test_api_handles_every_name_in_a_path(pages: httpx2.AsyncClient, path: str) -> None:
    for hostile in (*TEXTS, "\ud83d", "9" * 19, "٣", "-1", "1e3"):
        quoted = quote(hostile.encode("utf-8", "surrogatepass"), safe="")
        check(await pages.get(f"/v1/{path.replace('{}', quoted)}"), hostile)
    assert (await pages.get(f"/v1/models/{MODEL}")).status_code == 200
