"""The pages of the REST interface about all models: register, serve, aliases, tags, notes, retire, garbage, audit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry import changes, http, states
from headrace_registry.catalog import aliases, audit, describing, queries, registering, retiring, serving
from headrace_registry.changes import RegistryChanges
from headrace_registry.garbage.collector import GarbageCollector
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_registry.settings import RegistrySettings
from headrace_registry.transition import Transition
from headrace_runtime.blobs import BlobStore
from headrace_runtime.database import Database
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.settings import Common
from headrace_runtime.web import parameters_of
from headrace_schemas.catalog import (
    AliasesRequest,
    AuditList,
    GarbageRequest,
    NoteList,
    NoteRequest,
    RegisterRequest,
    RetireRequest,
    ServeRequest,
    TagsRequest,
)
from headrace_schemas.registry_api import VersionList

_NUMBER_MAX = 2**63 - 1
OfVersion = Callable[[AsyncConnection, datetime, Transition, ModelRecord, VersionRecord], Awaitable[str | None]]


class CatalogApi:
    """Any registry answers reads; only the leader takes changes."""

    def __init__(
        self,
        common: Common,
        settings: RegistrySettings,
        blobs: BlobStore,
        database: Database,
        made: RegistryChanges,
        garbage: GarbageCollector,
    ) -> None:
        self._common = common
        self._settings = settings
        self._blobs = blobs
        self._database = database
        self._changes = made
        self._garbage = garbage

    def routes(self) -> list[Route]:
        guarded = partial(http.for_insiders, self._common)
        posts = {
            "register": self.register,
            "serve": self.serve,
            "unserve": self.unserve,
            "aliases": self.aliases,
            "retire": self.retire,
            "tags": self.tags,
            "notes": self.note,
        }
        changing = [
            Route(f"/v1/models/{{name}}/{path}", guarded(page), methods=["POST"]) for path, page in posts.items()
        ]
        return [
            *changing,
            Route("/v1/models/{name}/notes", guarded(self.notes), methods=["GET"]),
            Route("/v1/versions/{version}", guarded(self.one)),
            Route("/v1/garbage", guarded(self.collect), methods=["POST"]),
            Route("/v1/audit", guarded(self.audited)),
        ]

    async def register(self, request: Request) -> Response:
        """201: the version is known; where it is to be served, replicas load and probe it now."""
        body = await http.body(request, RegisterRequest)
        self._changes.check_leads()
        name = request.path_params["name"]
        async with self._garbage.lock:
            try:
                manifest = await registering.read(self._blobs, body.manifest, name)
            except Unavailable as error:
                raise Refused(503, "unavailable", str(error)) from None

            async def work(tx: AsyncConnection, now: datetime, transition: Transition) -> str:
                found = await registering.register(tx, now, transition, manifest, body.manifest, body.label)
                if body.serve:
                    record = await changes.model(tx, name)
                    await serving.serve(tx, transition, record, found, self._settings.served_max)
                return f"label {body.label}" if body.label else ""

            act = self._act(request, "register", manifest.version, body.why)
            return http.answer(await self._changes.make(name, act, work), 201)

    async def serve(self, request: Request) -> Response:
        body = await http.body(request, ServeRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, transition: Transition, model: ModelRecord, one: VersionRecord
        ) -> None:
            await serving.serve(tx, transition, model, one, self._settings.served_max)

        return await self._of_version(request, body.version, body.why, work)

    async def unserve(self, request: Request) -> Response:
        body = await http.body(request, ServeRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, transition: Transition, model: ModelRecord, one: VersionRecord
        ) -> None:
            await serving.unserve(tx, transition, model, one)

        return await self._of_version(request, body.version, body.why, work)

    async def aliases(self, request: Request) -> Response:
        """409 `alias_moved` when one of them is not what the asker took it for; then none has moved."""
        body = await http.body(request, AliasesRequest)
        name = request.path_params["name"]

        async def work(tx: AsyncConnection, now: datetime, transition: Transition) -> str:
            record = await changes.model(tx, name)
            return await aliases.move(tx, now, transition, record, body.moves, self._settings.served_max)

        return http.answer(await self._changes.make(name, self._act(request, "aliases", None, body.why), work))

    async def retire(self, request: Request) -> Response:
        body = await http.body(request, RetireRequest)
        return await self._of_version(request, body.version, body.why, retiring.retire)

    async def tags(self, request: Request) -> Response:
        body = await http.body(request, TagsRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, _transition: Transition, _model: ModelRecord, one: VersionRecord
        ) -> str:
            await describing.tag(tx, one, body.add, body.remove)
            return " ".join([*(f"+{tag}" for tag in body.add), *(f"-{tag}" for tag in body.remove)])

        return await self._of_version(request, body.version, body.why, work)

    async def note(self, request: Request) -> Response:
        body = await http.body(request, NoteRequest)
        who = audit.asker(request, self._common).who

        async def work(
            tx: AsyncConnection, now: datetime, _transition: Transition, _model: ModelRecord, one: VersionRecord
        ) -> None:
            await describing.note(tx, now, one, body.text, who)

        return await self._of_version(request, body.version, "", work)

    async def notes(self, request: Request) -> Response:
        async with self._database.transaction() as tx:
            record = await changes.model(tx, request.path_params["name"])
            one = await changes.version(tx, record, parameters_of(request, "version").get("version", ""))
            return http.answer(NoteList(data=await queries.notes(tx, one.version)))

    async def one(self, request: Request) -> Response:
        """One version by its full name, whatever model it is of."""
        wanted = request.path_params["version"]
        async with self._database.transaction() as tx:
            record = await changes.model(tx, wanted.partition("@")[0])
            found = [await changes.version(tx, record, wanted)]
            return http.answer(VersionList(data=await states.of_versions(tx, found)))

    async def collect(self, request: Request) -> Response:
        body = await http.body(request, GarbageRequest)
        self._changes.check_leads()
        act = self._act(request, "collect", None, body.why)
        try:
            return http.answer(await self._garbage.run(act, dry_run=body.dry_run))
        except Unavailable as error:
            raise Refused(503, "unavailable", f"not done, or not all of it: {error}; ask again") from None

    async def audited(self, request: Request) -> Response:
        parameters = parameters_of(request, "model", "before", "limit")
        before = http.number(parameters, "before", _NUMBER_MAX, _NUMBER_MAX)
        limit = http.limit(parameters)
        async with self._database.transaction() as tx:
            found = await audit.read(tx, parameters.get("model"), before, limit)
        return http.answer(AuditList(data=found))

    async def _of_version(self, request: Request, wanted: str, why: str, work: OfVersion) -> Response:
        name = request.path_params["name"]

        async def whole(tx: AsyncConnection, now: datetime, transition: Transition) -> str | None:
            record = await changes.model(tx, name)
            one = await changes.version(tx, record, wanted)
            return await work(tx, now, transition, record, one)

        action = request.url.path.rpartition("/")[2]
        return http.answer(await self._changes.make(name, self._act(request, action, wanted, why), whole))

    def _act(self, request: Request, action: str, version: str | None, why: str) -> audit.Act:
        return audit.Act(audit.asker(request, self._common), action, version, why)
