"""REST endpoints of models: list models and versions; promote, roll back, withdraw, pin and pause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry.pages import http
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.storage import audit, rollout_store, store
from headrace_registry.storage.records import ModelRecord
from headrace_registry.versions import lifecycle, probe, state_changes
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_runtime.http.web import parameters_of
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database
from headrace_schemas import Replica
from headrace_schemas.http.registry_api import (
    AuditedPromoteRequest,
    HoldRequest,
    ModelList,
    PinRequest,
    RollbackRequest,
    VersionList,
    WithdrawRequest,
)

log = get_logger(__name__)
Change = Callable[[Transition, ModelRecord, AsyncConnection], Awaitable[None]]
"""Function that changes a model in a transaction. If it raises `Refused`, nothing is stored."""


class RegistryApi:
    """REST endpoints of models and their versions.

    Every registry answers read requests; only the leader accepts changes. A response is sent once the change is durable
    and published.
    """

    def __init__(
        self,
        common: Common,
        database: Database,
        clock: Clock,
        replicas: Callable[[], Iterable[Replica]],
        changes: RegistryChanges,
    ) -> None:
        self._common = common
        self._database = database
        self._clock = clock
        self._replicas = replicas
        self._changes = changes

    def routes(self) -> list[Route]:
        guarded = partial(http.require_key, self._common)
        return [
            Route("/v1/models", guarded(self.models)),
            Route("/v1/models/{name}", guarded(self.model)),
            Route("/v1/models/{name}/versions", guarded(self.versions)),
            Route("/v1/models/{name}/promote", guarded(self.promote), methods=["POST"]),
            Route("/v1/models/{name}/rollback", guarded(self.roll_back), methods=["POST"]),
            Route("/v1/models/{name}/withdraw", guarded(self.withdraw), methods=["POST"]),
            Route("/v1/models/{name}/pin", guarded(self.pin), methods=["POST"]),
            Route("/v1/models/{name}/unpin", guarded(self.unpin), methods=["POST"]),
            Route("/v1/models/{name}/pause", guarded(self.pause), methods=["POST"]),
            Route("/v1/models/{name}/resume", guarded(self.resume), methods=["POST"]),
            Route("/v1/models/{name}/stop", guarded(self.stop), methods=["POST"]),
        ]

    async def models(self, _request: Request) -> Response:
        async with self._database.transaction() as tx:
            records = [await store.require_model(tx, name) for name in await store.model_names(tx)]
            data = [await http.model_state(tx, record, self._alive()) for record in records]
            return http.json_response(ModelList(data=tuple(data)))

    async def model(self, request: Request) -> Response:
        async with self._database.transaction() as tx:
            record = await store.require_model(tx, request.path_params["name"])
            return http.json_response(await http.model_state(tx, record, self._alive()))

    def _alive(self) -> list[Replica]:
        return probe.live_replicas(self._replicas(), self._clock.now())

    async def versions(self, request: Request) -> Response:
        limit = http.limit_parameter(parameters_of(request, "limit"))
        async with self._database.transaction() as tx:
            record = await store.require_model(tx, request.path_params["name"])
            versions = await store.newest_versions(tx, record.model, limit)
            return http.json_response(VersionList(data=await http.version_states(tx, versions)))

    async def promote(self, request: Request) -> Response:
        """Make a version the next candidate. The response has status 202, because the decision about the candidate
        follows later as an event."""
        body = await http.read_body(request, AuditedPromoteRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            version = await store.require_version(tx, model, body.version)
            if version.version == model.champion:
                raise Refused(409, "already_champion", f"{version.version} is the champion", "version")
            if model.pinned not in (None, version.version):
                raise Refused(
                    409, "pinned", f"model {model.model} is pinned to {model.pinned}; unpin it first", "version"
                )
            if version.state == "withdrawn" and not body.force:
                raise Refused(
                    409,
                    "withdrawn",
                    f"{version.version} was withdrawn; promote it with `force` to end the withdrawal",
                    "version",
                )
            if version.state == "canary" and not body.force:
                raise Refused(409, "canary", f"{version.version} already has a rollout in progress", "version")
            problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
            if problem:
                raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "version")
            await transition.request(version, "force" if body.force else "gate")

        return await self._change(request, change, version=body.version, why=body.reason, status=202)

    async def roll_back(self, request: Request) -> Response:
        body = await http.read_body(request, RollbackRequest)

        async def change(transition: Transition, model: ModelRecord, _tx: AsyncConnection) -> None:
            if model.champion is None or model.previous is None:
                raise Refused(409, "no_previous", f"model {model.model} has no previous version to go back to")
            alive = self._alive()
            if alive and not probe.served_by_any(model.previous, alive):
                raise Refused(409, "previous_not_ready", f"no replica holds {model.previous} ready")
            await transition.roll_back(model, body.reason or "an operator rolled back")

        return await self._change(request, change, why=body.reason)

    async def withdraw(self, request: Request) -> Response:
        body = await http.read_body(request, WithdrawRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            version = await store.require_version(tx, model, body.version)
            if version.version == model.champion:
                raise Refused(409, "is_champion", f"{version.version} is the champion; roll back instead", "version")
            if version.state != "withdrawn":
                await transition.withdraw(model, version.version, body.reason or "an operator withdrew it")

        return await self._change(request, change, version=body.version, why=body.reason)

    async def pin(self, request: Request) -> Response:
        """Pin the model to its champion or to another version. The other version becomes champion once it has passed
        its probe."""
        body = await http.read_body(request, PinRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            name = body.version or model.champion
            if name is None:
                raise Refused(409, "no_champion", f"model {model.model} has no champion to pin; name a version")
            version = await store.require_version(tx, model, name)
            if version.state == "withdrawn":
                raise Refused(409, "withdrawn", f"{name} was withdrawn; promote it with `force` first", "version")
            problem = lifecycle.incompatibility(version, await store.load_view(tx, model, "", version))
            if problem:
                raise Refused(409, "incompatible_version", f"{name}: {problem}", "version")
            await transition.pin(model, name)
            if name != model.champion:
                await transition.request(version, "force")
            log.info("pinned", model=model.model, version=name, reason=body.reason)

        return await self._change(request, change, version=body.version, why=body.reason)

    async def unpin(self, request: Request) -> Response:
        return await self._hold(request, "unpinned", lambda transition, model: transition.unpin(model))

    async def pause(self, request: Request) -> Response:
        """Pause the model: new versions do not become candidates. Versions that an operator requests are still
        tried."""
        return await self._hold(request, "paused", lambda transition, model: transition.pause(model, True))

    async def stop(self, request: Request) -> Response:
        """Pause the model, and end all its rollouts without a promotion or rollback, so that the champion serves all
        traffic."""
        body = await http.read_body(request, HoldRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            await transition.pause(model, True)
            for rollout in await rollout_store.rollouts_under_way(tx, model.model):
                await state_changes.hold(
                    transition, rollout, body.reason or "an operator stopped it", dict(rollout.statistics)
                )

        return await self._change(request, change, why=body.reason)

    async def resume(self, request: Request) -> Response:
        return await self._hold(request, "resumed", lambda transition, model: transition.pause(model, False))

    async def _hold(
        self, request: Request, event: str, hold: Callable[[Transition, ModelRecord], Awaitable[None]]
    ) -> Response:
        body = await http.read_body(request, HoldRequest)

        async def change(transition: Transition, model: ModelRecord, _tx: AsyncConnection) -> None:
            await hold(transition, model)
            log.info(event, model=model.model, reason=body.reason)

        return await self._change(request, change, why=body.reason)

    async def _change(
        self, request: Request, change: Change, *, version: str | None = None, why: str = "", status: int = 200
    ) -> Response:
        name = request.path_params["name"]

        async def work(tx: AsyncConnection, _now: datetime, transition: Transition) -> None:
            await change(transition, await store.require_model(tx, name), tx)

        action = request.url.path.rpartition("/")[2]
        act = audit.AuditedAction(audit.requester(request, self._common), action, version, why)
        return http.json_response(await self._changes.make(name, act, work), status)
