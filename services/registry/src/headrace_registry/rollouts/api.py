"""The pages of the REST interface about rollouts: look, begin, stop, promote, roll back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry import changes, http, lifecycle, store
from headrace_registry.catalog import audit
from headrace_registry.changes import RegistryChanges
from headrace_registry.records import ModelRecord
from headrace_registry.rollouts import kept, settling, states, steps
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.settings import RolloutSettings, Wish
from headrace_registry.transition import Transition
from headrace_runtime.database import Database
from headrace_runtime.errors import Refused
from headrace_runtime.settings import Common
from headrace_runtime.web import parameters_of
from headrace_schemas.rollout_api import RolloutChange, RolloutList, RolloutRequest

Change = Callable[[Transition, ModelRecord, KeptRollout, str], Awaitable[None]]


class RolloutApi:
    """Any registry answers reads; only the leader takes changes."""

    def __init__(self, common: Common, settings: RolloutSettings, database: Database, made: RegistryChanges) -> None:
        self._common = common
        self._settings = settings
        self._database = database
        self._changes = made

    def routes(self) -> list[Route]:
        guarded = partial(http.for_insiders, self._common)
        posts = {"stop": _stop, "promote": _promote, "rollback": _roll_back}
        return [
            Route("/v1/rollouts", guarded(self.list)),
            Route("/v1/rollouts/{rollout}", guarded(self.one)),
            Route("/v1/models/{name}/rollouts", guarded(self.begin), methods=["POST"]),
            *(
                Route(f"/v1/rollouts/{{rollout}}/{path}", guarded(self._page(change)), methods=["POST"])
                for path, change in posts.items()
            ),
        ]

    async def list(self, request: Request) -> Response:
        parameters = parameters_of(request, "model", "limit")
        limit = http.limit(parameters)
        async with self._database.transaction() as tx:
            found = await kept.newest(tx, parameters.get("model"), limit)
        return http.answer(RolloutList(data=tuple(states.of(one) for one in found)))

    async def one(self, request: Request) -> Response:
        return await self._answer(request.path_params["rollout"])

    async def begin(self, request: Request) -> Response:
        """202: the version is the next candidate at the gate; its rollout begins when it has passed."""
        body = await http.body(request, RolloutRequest)
        wish = Wish(kind=body.kind, share=body.share)
        try:
            self._settings.plan(wish)
        except ValueError as error:
            raise Refused(400, "invalid_request", f"share: {error}", "share") from None

        async def work(tx: AsyncConnection, _now: datetime, transition: Transition) -> None:
            model = await changes.model(tx, request.path_params["name"])
            version = await changes.version(tx, model, body.version)
            if version.version == model.champion:
                raise Refused(409, "already_champion", f"{version.version} is the champion", "version")
            if version.state in ("canary", "withdrawn"):
                state = "under way already" if version.state == "canary" else "withdrawn"
                raise Refused(409, version.state, f"{version.version} is {state}", "version")
            if model.pinned not in (None, version.version):
                raise Refused(409, "pinned", f"model {model.model} is pinned to {model.pinned}; unpin it first")
            problem = lifecycle.objection(version, await store.view(tx, model, "", version))
            if problem:
                raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "version")
            await transition.request(version, "gate", wish.model_dump_json())

        act = audit.Act(audit.asker(request, self._common), "rollout", body.version, body.reason)
        return http.answer(await self._changes.make(request.path_params["name"], act, work), 202)

    def _page(self, change: Change) -> http.Page:
        async def page(request: Request) -> Response:
            body = await http.body(request, RolloutChange)
            rollout_id = request.path_params["rollout"]
            async with self._database.transaction() as tx:
                found = await _found(tx, rollout_id)

            async def work(tx: AsyncConnection, _now: datetime, transition: Transition) -> None:
                current = await _found(tx, rollout_id)
                if not current.going_on:
                    raise Refused(409, "over", f"rollout {rollout_id} is over: {current.phase.replace('_', ' ')}")
                reason = body.reason or "an operator asked for it"
                await change(transition, await changes.model(tx, current.model), current, reason)

            action = f"rollout-{request.url.path.rpartition('/')[2]}"
            act = audit.Act(audit.asker(request, self._common), action, found.version, body.reason)
            await self._changes.make(found.model, act, work)
            return await self._answer(rollout_id)

        return page

    async def _answer(self, rollout_id: str) -> Response:
        async with self._database.transaction() as tx:
            found = await _found(tx, rollout_id)
            decided = await store.decisions(tx, [found.version])
        own = tuple(event for event in decided if event.rollout and event.rollout.rollout_id == rollout_id)
        return http.answer(states.of(found, own, chart=True))


async def _found(tx: AsyncConnection, rollout_id: str) -> KeptRollout:
    found = await kept.one(tx, rollout_id)
    if found is None:
        raise Refused(404, "rollout_not_found", f"there is no rollout {rollout_id!r}", "rollout")
    return found


async def _stop(transition: Transition, _model: ModelRecord, one: KeptRollout, reason: str) -> None:
    """Hold: the version serves nobody any more, and nothing is said against it."""
    await settling.hold(transition, one, reason, dict(one.statistics))


async def _promote(transition: Transition, model: ModelRecord, one: KeptRollout, reason: str) -> None:
    """Champion at once, past what its sessions have still to show."""
    if model.pinned not in (None, one.version):
        raise Refused(409, "pinned", f"model {model.model} is pinned to {model.pinned}; unpin it first")
    await steps.promote(transition, model, one, reason, one.statistics, family=model.family)


async def _roll_back(transition: Transition, model: ModelRecord, one: KeptRollout, reason: str) -> None:
    """Withdrawn, with what descends from it."""
    await steps.roll_back(transition, model, one, reason, one.statistics)
