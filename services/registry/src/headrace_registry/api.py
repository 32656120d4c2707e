"""The REST interface: read models and versions; promote, roll back, withdraw."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry import lifecycle, probe, store
from headrace_registry.leader import LeaderLease, LostLeadership
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.transition import Transition
from headrace_runtime.database import Database
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_runtime.settings import Common
from headrace_runtime.web import require_internal_key
from headrace_schemas import Event, ModelEvent, Replica
from headrace_schemas.base import Model
from headrace_schemas.registry_api import (
    HoldRequest,
    ModelList,
    ModelState,
    PinRequest,
    PromoteRequest,
    RollbackRequest,
    VersionList,
    VersionState,
    WithdrawRequest,
)

log = get_logger(__name__)
_BODY_BYTES_MAX = 65_536
_LIST_MAX = 1000
M = TypeVar("M", bound=Model)
Page = Callable[[Request], Awaitable[Response]]
Change = Callable[[Transition, ModelRecord, AsyncConnection], Awaitable[None]]
"""Raises `Refused` before it has changed anything."""


class RegistryApi:
    """Any registry answers reads; only the leader takes changes. A change returns once it is durable and published."""

    def __init__(
        self,
        common: Common,
        database: Database,
        processor: Processor,
        lease: LeaderLease,
        replicas: Callable[[], Iterable[Replica]],
        changed: Callable[[], None],
    ) -> None:
        self._common = common
        self._database = database
        self._processor = processor
        self._lease = lease
        self._replicas = replicas
        self._changed = changed

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._for_insiders(self.models)),
            Route("/v1/models/{name}", self._for_insiders(self.model)),
            Route("/v1/models/{name}/versions", self._for_insiders(self.versions)),
            Route("/v1/models/{name}/promote", self._for_insiders(self.promote), methods=["POST"]),
            Route("/v1/models/{name}/rollback", self._for_insiders(self.roll_back), methods=["POST"]),
            Route("/v1/models/{name}/withdraw", self._for_insiders(self.withdraw), methods=["POST"]),
            Route("/v1/models/{name}/pin", self._for_insiders(self.pin), methods=["POST"]),
            Route("/v1/models/{name}/unpin", self._for_insiders(self.unpin), methods=["POST"]),
            Route("/v1/models/{name}/pause", self._for_insiders(self.pause), methods=["POST"]),
            Route("/v1/models/{name}/resume", self._for_insiders(self.resume), methods=["POST"]),
        ]

    def _for_insiders(self, page: Page) -> Page:
        """Require the internal key, where there is one, for reads and changes."""

        async def guarded(request: Request) -> Response:
            require_internal_key(request, self._common)
            return await page(request)

        return guarded

    async def models(self, _request: Request) -> Response:
        async with self._database.transaction() as tx:
            records = [await self._model(tx, name) for name in await store.model_names(tx)]
        return _answer(ModelList(data=tuple(_model_state(record) for record in records)))

    async def model(self, request: Request) -> Response:
        async with self._database.transaction() as tx:
            return _answer(_model_state(await self._model(tx, request.path_params["name"])))

    async def versions(self, request: Request) -> Response:
        limit = _limit(request)
        async with self._database.transaction() as tx:
            record = await self._model(tx, request.path_params["name"])
            found = await store.newest(tx, record.model, limit)
            decided = await store.decisions(tx, [version.version for version in found])
        return _answer(VersionList(data=tuple(_version_state(version, decided) for version in found)))

    async def promote(self, request: Request) -> Response:
        """202: the version is the next candidate; the decision follows as an event."""
        body = await _body(request, PromoteRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            version = await self._version(tx, model, body.version)
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
                    f"{version.version} was withdrawn; promote it with `force` to take that back",
                    "version",
                )
            problem = lifecycle.objection(version, await store.view(tx, model, ""))
            if problem:
                raise Refused(409, "incompatible_version", f"{version.version}: {problem}", "version")
            await transition.request(version, "force" if body.force else "gate")

        return await self._change(request, change, 202)

    async def roll_back(self, request: Request) -> Response:
        body = await _body(request, RollbackRequest)

        async def change(transition: Transition, model: ModelRecord, _tx: AsyncConnection) -> None:
            if model.champion is None or model.previous is None:
                raise Refused(409, "no_previous", f"model {model.model} has no previous version to go back to")
            alive = probe.live(self._replicas(), self._processor.clock.now())
            if alive and not probe.served_by_any(model.previous, alive):
                raise Refused(409, "previous_not_ready", f"no replica holds {model.previous} ready")
            await transition.roll_back(model, body.reason or "an operator rolled back")

        return await self._change(request, change)

    async def withdraw(self, request: Request) -> Response:
        body = await _body(request, WithdrawRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            version = await self._version(tx, model, body.version)
            if version.version == model.champion:
                raise Refused(409, "is_champion", f"{version.version} is the champion; roll back instead", "version")
            if version.state != "withdrawn":
                await transition.withdraw(model, version.version, body.reason or "an operator withdrew it")

        return await self._change(request, change)

    async def pin(self, request: Request) -> Response:
        """Pin the champion, or another version, which becomes champion once it is probed."""
        body = await _body(request, PinRequest)

        async def change(transition: Transition, model: ModelRecord, tx: AsyncConnection) -> None:
            name = body.version or model.champion
            if name is None:
                raise Refused(409, "no_champion", f"model {model.model} has no champion to pin; name a version")
            version = await self._version(tx, model, name)
            if version.state == "withdrawn":
                raise Refused(409, "withdrawn", f"{name} was withdrawn; promote it with `force` first", "version")
            problem = lifecycle.objection(version, await store.view(tx, model, ""))
            if problem:
                raise Refused(409, "incompatible_version", f"{name}: {problem}", "version")
            await transition.pin(model, name)
            if name != model.champion:
                await transition.request(version, "force")
            log.info("pinned", model=model.model, version=name, reason=body.reason)

        return await self._change(request, change)

    async def unpin(self, request: Request) -> Response:
        return await self._hold(request, "unpinned", lambda transition, model: transition.unpin(model))

    async def pause(self, request: Request) -> Response:
        """New versions are registered and wait. Requests of operators still take effect."""
        return await self._hold(request, "paused", lambda transition, model: transition.pause(model, True))

    async def resume(self, request: Request) -> Response:
        return await self._hold(request, "resumed", lambda transition, model: transition.pause(model, False))

    async def _hold(
        self, request: Request, event: str, hold: Callable[[Transition, ModelRecord], Awaitable[None]]
    ) -> Response:
        body = await _body(request, HoldRequest)

        async def change(transition: Transition, model: ModelRecord, _tx: AsyncConnection) -> None:
            await hold(transition, model)
            log.info(event, model=model.model, reason=body.reason)

        return await self._change(request, change)

    async def _change(self, request: Request, change: Change, status: int = 200) -> Response:
        if not self._lease.held.is_set():
            raise _standby()
        name = request.path_params["name"]
        after: list[ModelRecord] = []
        refused: list[Refused] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            transition = Transition(tx, now)
            try:
                await change(transition, await self._model(tx, name), tx)
            except Refused as error:
                refused[:] = [error]
                return ()
            events = await transition.finish()
            after[:] = [await self._model(tx, name)]
            return events

        try:
            await self._processor.step(work)
        except LostLeadership:
            raise _standby() from None
        except Unavailable as error:
            raise Refused(503, "unavailable", f"not done, or done and not yet published: {error}") from None
        if refused:
            raise refused[0]
        self._changed()
        return _answer(_model_state(after[0]), status)

    @staticmethod
    async def _model(tx: AsyncConnection, name: str) -> ModelRecord:
        record = await store.model(tx, name)
        if record is None:
            raise Refused(404, "model_not_found", f"there is no model {name!r}", "model")
        return record

    @staticmethod
    async def _version(tx: AsyncConnection, model: ModelRecord, name: str) -> VersionRecord:
        version = await store.version(tx, name)
        if version is None or version.model != model.model:
            raise Refused(404, "version_not_found", f"model {model.model!r} has no version {name!r}", "version")
        return version


def _standby() -> Refused:
    return Refused(503, "not_leader", "this registry is a standby; ask the leader")


def _answer(value: Model, status: int = 200) -> Response:
    return Response(value.model_dump_json(exclude_none=True), status, media_type="application/json")


async def _body(request: Request, model: type[M]) -> M:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _BODY_BYTES_MAX:
            raise Refused(413, "body_too_large", f"the body is larger than {_BODY_BYTES_MAX} bytes")
    try:
        return model.model_validate_json(content or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, "invalid_request", f"{where or 'body'}: {first['msg']}", where or None) from None


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    if not text.isdecimal() or not 1 <= int(text) <= _LIST_MAX:
        raise Refused(400, "invalid_request", f"limit must be a number from 1 to {_LIST_MAX}", "limit")
    return int(text)


def _model_state(record: ModelRecord) -> ModelState:
    return ModelState(
        id=record.model,
        champion=record.champion,
        previous=record.previous,
        candidate=record.candidate,
        pinned=record.pinned,
        paused=record.paused,
        anchor=record.anchor or record.champion,
        trials=record.trials,
        revision=record.revision,
    )


def _version_state(version: VersionRecord, decided: Sequence[ModelEvent]) -> VersionState:
    return VersionState(
        id=version.version,
        model=version.model,
        lineage=version.lineage,
        step=version.step,
        parent=version.parent,
        base=version.base,
        state=version.state,
        registered_at=version.registered,
        decisions=tuple(event for event in decided if event.version == version.version),
    )
