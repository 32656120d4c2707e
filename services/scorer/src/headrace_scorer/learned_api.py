"""REST interface of reward models and of the agreement between judges and people. It requires the internal key."""

from __future__ import annotations

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
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event
from headrace_schemas.values.text import printable
from headrace_scorer import judge_monitor
from headrace_scorer.learned import store
from headrace_scorer.learned.models import REWARD_MODELS
from headrace_scorer.learned.settings import PREFIX
from headrace_scorer.settings import DriftSettings

_LISTED_MAX = 64


def routes(common: Common, drift: DriftSettings, processor: Processor) -> Sequence[BaseRoute]:
    """Return the routes of the interface."""

    async def reward_models(request: Request) -> Response:
        require_internal_key(request, common)
        async with processor.database.transaction() as tx:
            rows = await store.listed(tx, _LISTED_MAX)
        return JSONResponse({"data": [_model(row) for row in rows]})

    async def agreement(request: Request) -> Response:
        require_internal_key(request, common)
        async with processor.database.transaction() as tx:
            return JSONResponse({"data": await judge_monitor.listed(tx, drift)})

    async def forget(request: Request) -> Response:
        require_internal_key(request, common)
        parameters = parameters_of(request, "source", "tenant")
        source, tenant = parameters.get("source", ""), parameters.get("tenant", "default")
        forgotten = 0

        async def step(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            nonlocal forgotten
            forgotten = await judge_monitor.forget(tx, tenant, source)
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
