"""The scorer's REST and its settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, load
from headrace_scorer import api
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.settings import ScorerSettings
from tests.support.trajectories import closed
from tests.unit.scorer.conftest import Rig, half, scorer

COMMON = Common.model_validate({"security": {"internal_key": "key"}})


@pytest.fixture
async def rig(data_dir: Path) -> AsyncIterator[Rig]:
    async with scorer("sqlite", data_dir, half) as opened:
        yield opened


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[FunctionPool]:
    (tmp_path / "r.py").write_text("def score():\n    return 1.0\n")
    created = FunctionPool(ScorerSettings(functions=(f"{tmp_path}/r.py:score",)))
    await created.reload()
    yield created
    await created.close()


def client(pool: FunctionPool, rig: Rig, key: str = "key") -> httpx.AsyncClient:
    application = web.app({}, api.routes(COMMON, pool, rig.stream.processor.database))
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://scorer", headers=headers)


async def test_functions_are_listed_and_reloaded_or_left_as_they_were(
    rig: Rig, pool: FunctionPool, tmp_path: Path
) -> None:
    async with client(pool, rig) as http:
        before = (await http.get("/functions")).json()["functions"]
        assert [(function["name"], function["parameters"]) for function in before] == [("score", [])]
        (tmp_path / "r.py").write_text("def score(context):\n    return 0.5\n")
        after = (await http.post("/reload")).json()["functions"]
        assert after[0]["parameters"] == ["context"]
        assert after[0]["digest"] != before[0]["digest"]
        (tmp_path / "r.py").write_text("def score(weather):\n    return 0.5\n")
        refused = await http.post("/reload")
        assert refused.status_code == 422
        assert "parameter weather" in refused.json()["error"]["message"]
        assert (await http.get("/functions")).json()["functions"] == after


async def test_the_ledger_shows_every_revision(rig: Rig, pool: FunctionPool) -> None:
    trajectory = closed()
    await rig.deliver(trajectory)
    async with client(pool, rig) as http:
        rewards = (await http.get(f"/ledger/{trajectory.trajectory_id}")).json()["rewards"]
        assert [(row["source"], row["revision"], row["value"]) for row in rewards] == [("function:half", 0, 0.5)]
        assert rewards[0]["time"].startswith("2026-01-01T00:00:00")
        assert (await http.get("/ledger/unknown")).status_code == 404


async def test_the_pages_need_the_internal_key(rig: Rig, pool: FunctionPool) -> None:
    async with client(pool, rig, "wrong") as http:
        for page in (http.get("/functions"), http.post("/reload"), http.get("/ledger/x")):
            assert (await page).status_code == 401


def test_a_required_source_without_a_weight_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text('[scorer]\nrequired = ["feedback"]\n[scorer.weights]\n"judge:*" = 1.0\n')
    with pytest.raises(SettingError, match="required source 'feedback' has no weight"):
        load("scorer", ScorerSettings, path, {})


@pytest.mark.parametrize("weights", ['"*" = -1.0', '"*" = inf', ""])
def test_weights_are_finite_and_not_negative(tmp_path: Path, weights: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(f"[scorer.weights]\n{weights}\n")
    with pytest.raises(SettingError, match=r"scorer\.weights"):
        load("scorer", ScorerSettings, path, {})
