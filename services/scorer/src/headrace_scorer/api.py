"""REST interface of the scorer: reward functions, the ledger of a trajectory, reward models, and the agreement
between judges and people.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.errors import Refused
from headrace_runtime.http.web import parameters_of, require_internal_key
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event
from headrace_schemas.values.text import printable
from headrace_scorer import judge_monitor, ledger
from headrace_scorer.feedback_entries import ANY_CHOICE
from headrace_scorer.functions.process import FunctionPool, FunctionsRefused
from headrace_scorer.learned import store
from headrace_scorer.learned.models import PREFIX, REWARD_MODELS
from headrace_scorer.settings import DriftSettings

_LISTED_MAX = 64


def routes(common: Common, pool: FunctionPool, database: Database) -> Sequence[BaseRoute]:
    def list_functions() -> Response:
        return JSONResponse({"functions": [function.model_dump() for function in pool.functions]})

    async def functions(request: Request) -> Response:
        require_internal_key(request, common)
        return list_functions()

    async def reload(request: Request) -> Response:
        require_internal_key(request, common)
        try:
            await pool.reload()
        except FunctionsRefused as error:
            raise Refused(422, "functions_refused", f"{error}; the functions loaded before stay in use") from None
        return list_functions()

    async def history(request: Request) -> Response:
        require_internal_key(request, common)
        trajectory_id = request.path_params["trajectory_id"]
        async with database.transaction() as tx:
            rows = await ledger.history(tx, trajectory_id)
        if not rows:
            raise Refused(404, "not_found", f"the ledger has no reward, edit or preference of {trajectory_id!r}")
        entries = {
            "rewards": [_reward(row) for row in rows if row["kind"] == "reward"],
            "edits": [_edit(row) for row in rows if row["kind"] == "edit"],
            "preferences": [_preference(row) for row in rows if row["kind"] == "preference"],
        }
        return JSONResponse({"trajectory_id": trajectory_id, **entries})

    return [
        Route("/functions", functions),
        Route("/reload", reload, methods=["POST"]),
        Route("/ledger/{trajectory_id}", history),
    ]


def _reward(row: ledger.Row) -> dict[str, object]:
    plain = ("value", "judged_by")
    criteria = json.loads(row["criteria"]) if row["criteria"] else {}
    return {**_entry(row), **{name: row[name] for name in plain}, "criteria": criteria}


def _edit(row: ledger.Row) -> dict[str, object]:
    message = json.loads(row["detail"]) if row["detail"] else None
    return {**_entry(row), "rater": row["subject"] or None, "message": message}


def _preference(row: ledger.Row) -> dict[str, object]:
    return {**_entry(row), "preference_id": row["subject"], "side": row["detail"]}


def _entry(row: ledger.Row) -> dict[str, object]:
    """Return the fields that rewards, edits and preferences have in common."""
    return {
        **{name: row[name] for name in ("tenant", "source", "revision", "outcome", "reason")},
        "turn_id": row["turn_id"] or None,
        "choice": None if row["choice"] == ANY_CHOICE else row["choice"],
        "time": from_epoch_ms(row["time_ms"]).isoformat(),
    }


def learned_routes(common: Common, drift: DriftSettings, processor: Processor) -> Sequence[BaseRoute]:
    """Return the REST routes of reward models and of the agreement between judges and people."""

    async def reward_models(request: Request) -> Response:
        require_internal_key(request, common)
        async with processor.database.transaction() as tx:
            rows = await store.list_models(tx, _LISTED_MAX)
        return JSONResponse({"data": [_model(row) for row in rows]})

    async def agreement(request: Request) -> Response:
        require_internal_key(request, common)
        async with processor.database.transaction() as tx:
            return JSONResponse({"data": await judge_monitor.list_judges(tx, drift)})

    async def forget(request: Request) -> Response:
        require_internal_key(request, common)
        parameters = parameters_of(request, "source", "tenant")
        source, tenant = parameters.get("source", ""), parameters.get("tenant", "default")
        forgotten = 0

        async def step(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            nonlocal forgotten
            forgotten = await judge_monitor.reset_judge(tx, tenant, source)
            return []

        await processor.step(step)
        if not forgotten:
            names = f"source={printable(source)!r} of tenant {printable(tenant)!r}"
            text = f"{names}: this source was not compared with people; GET /agreement lists the sources that were"
            raise Refused(404, "not_found", text)
        return JSONResponse({"forgotten": forgotten})

    return [
        Route("/reward-models", reward_models),
        Route("/agreement", agreement),
        Route("/agreement/forget", forget, methods=["POST"]),
    ]


def _model(row: Any) -> dict[str, object]:
    fitted = REWARD_MODELS.get(row["source"].removeprefix(PREFIX)).read(row["payload"])
    plain = {name: row[name] for name in ("tenant", "source", "model_id")}
    return {**plain, "fitted_at": from_epoch_ms(row["fitted_ms"]).isoformat(), **fitted.facts()}
