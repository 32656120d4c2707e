"""REST endpoints of rollouts: list, show, begin, stop, promote, roll back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry.control import steps
from headrace_registry.control.rollout_reports import rollout_state
from headrace_registry.pages import http
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.rollouts.settings import RequestedRollout, RolloutSettings
from headrace_registry.storage import audit, rollout_store, store
from headrace_registry.storage.records import ModelRecord
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.versions import lifecycle, state_changes
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import Refused
from headrace_runtime.http.web import parameters_of
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_schemas.http.registry_api import RolloutChange, RolloutList, RolloutRequest

Change = Callable[[Transition, ModelRecord, RolloutRecord, str], Awaitable[None]]


class RolloutApi:
    """REST endpoints of rollouts. Every registry answers read requests; only the leader accepts changes."""

    def __init__(self, common: Common, settings: RolloutSettings, database: Database, changes: RegistryChanges) -> None:
        self._common = common
        self._settings = settings
        self._database = database
        self._changes = changes

    def routes(self) -> list[Route]:
        guarded = partial(http.require_key, self._common)
        posts = {"stop": _stop, "promote": _promote, "rollback": _roll_back}
        return [
            Route("/v1/rollouts", guarded(self.list)),
            Route("/v1/rollouts/{rollout}", guarded(self.rollout)),
            Route("/v1/models/{name}/rollouts", guarded(self.begin), methods=["POST"]),
            *(
                Route(f"/v1/rollouts/{{rollout}}/{path}", guarded(self._page(change)), methods=["POST"])
                for path, change in posts.items()
            ),
        ]

    async def list(self, request: Request) -> Response:
        parameters = parameters_of(request, "model", "limit")
        limit = http.limit_parameter(parameters)
        async with self._database.transaction() as tx:
            rollouts = await rollout_store.newest_rollouts(tx, parameters.get("model"), limit)
        return http.json_response(RolloutList(data=tuple(rollout_state(rollout) for rollout in rollouts)))

    async def rollout(self, request: Request) -> Response:
        return await self._answer(request.path_params["rollout"])

    async def begin(self, request: Request) -> Response:
        """Make a version the next candidate of the gate. The response has status 202, because the rollout begins only
        after the gate."""
        body = await http.read_body(request, RolloutRequest)
        wish = RequestedRollout(kind=body.kind, share=body.share)
        try:
            self._settings.plan(wish)
        except ValueError as error:
            raise Refused(400, "invalid_request", f"share: {error}", "share") from None

        async def work(tx: AsyncConnection, _now: datetime, transition: Transition) -> None:
            model = await store.require_model(tx, request.path_params["name"])
            version = await store.require_version(tx, model, body.version)
            if version.version == model.champion:
                raise Refused(409, "already_champion", f"{version.version} is the champion", "version")
            if version.state in ("canary", "withdrawn"):
                state = "already in a rollout" if version.state == "canary" else "withdrawn"
                raise Refused(409, version.state, f"{version.version} is {state}", "version")
            if model.pinned not in (None, version.version):
                raise Refused(409, "pinned", f"model {model.model} is pinned to {model.pinned}; unpin it first")
            problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
            if problem:
                raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "version")
            await transition.request(version, "gate", wish.model_dump_json())

        act = audit.AuditedAction(audit.requester(request, self._common), "rollout", body.version, body.reason)
        return http.json_response(await self._changes.make(request.path_params["name"], act, work), 202)

    def _page(self, change: Change) -> http.Page:
        async def page(request: Request) -> Response:
            body = await http.read_body(request, RolloutChange)
            rollout_id = request.path_params["rollout"]
            async with self._database.transaction() as tx:
                rollout = await _require_rollout(tx, rollout_id)

            async def work(tx: AsyncConnection, _now: datetime, transition: Transition) -> None:
                current = await _require_rollout(tx, rollout_id)
                if not current.is_under_way:
                    raise Refused(409, "over", f"rollout {rollout_id} is over: {current.phase.replace('_', ' ')}")
                reason = body.reason or "an operator requested it"
                await change(transition, await store.require_model(tx, current.model), current, reason)

            action = f"rollout-{request.url.path.rpartition('/')[2]}"
            act = audit.AuditedAction(audit.requester(request, self._common), action, rollout.version, body.reason)
            await self._changes.make(rollout.model, act, work)
            return await self._answer(rollout_id)

        return page

    async def _answer(self, rollout_id: str) -> Response:
        async with self._database.transaction() as tx:
            rollout = await _require_rollout(tx, rollout_id)
            version_decisions = await store.decisions(tx, [rollout.version])
        decisions = tuple(
            event for event in version_decisions if event.rollout and event.rollout.rollout_id == rollout_id
        )
        return http.json_response(rollout_state(rollout, decisions, chart=True))


async def _require_rollout(tx: AsyncConnection, rollout_id: str) -> RolloutRecord:
    rollout = await rollout_store.load_rollout(tx, rollout_id)
    if rollout is None:
        raise Refused(404, "rollout_not_found", f"there is no rollout {rollout_id!r}", "rollout")
    return rollout


async def _stop(transition: Transition, _model: ModelRecord, rollout: RolloutRecord, reason: str) -> None:
    """End a rollout without a promotion and without a rollback.

    The candidate gets no more traffic, but is not withdrawn.
    """
    await state_changes.hold(transition, rollout, reason, dict(rollout.statistics))


async def _promote(transition: Transition, model: ModelRecord, rollout: RolloutRecord, reason: str) -> None:
    """Make the candidate the champion at once, even if the plan requires more evidence."""
    if model.pinned not in (None, rollout.version):
        raise Refused(409, "pinned", f"model {model.model} is pinned to {model.pinned}; unpin it first")
    await steps.promote(transition, model, rollout, reason, rollout.statistics, family=model.family)


async def _roll_back(transition: Transition, model: ModelRecord, rollout: RolloutRecord, reason: str) -> None:
    """Withdraw the candidate and its descendants."""
    await steps.roll_back(transition, model, rollout, reason, rollout.statistics)
