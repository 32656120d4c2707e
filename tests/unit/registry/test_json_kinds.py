"""Values of every JSON type at every place of every route: unusable values are refused with their field."""

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

from headrace_registry.pages.changes import RegistryChanges
from headrace_registry.pages.rollout_api import RolloutApi
from headrace_runtime.settings.sections import Common
from tests.support.hostile_json import TEXTS, kinds_everywhere
from tests.unit.registry.catalog.catalog_bench import CatalogBench
from tests.unit.registry.rig import MODEL, Rig

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
    """All pages of a registry with two versions of `MODEL`."""
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
