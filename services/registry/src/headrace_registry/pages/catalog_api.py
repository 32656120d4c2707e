"""REST endpoints of the catalog of versions: register, serve, alias, tag, note, retire, garbage collection and audit
log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_registry import catalog
from headrace_registry.garbage.collector import GarbageCollector
from headrace_registry.pages import http
from headrace_registry.pages.http import RegistryChanges
from headrace_registry.settings import RegistrySettings
from headrace_registry.storage import audit, store
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.http.web import parameters_of
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas.http.catalog import (
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
from headrace_schemas.http.registry_api import VersionList

_NUMBER_MAX = 2**63 - 1
VersionChange = Callable[[AsyncConnection, datetime, Transition, ModelRecord, VersionRecord], Awaitable[str | None]]


class CatalogApi:
    """REST endpoints of the catalog of versions. Every registry answers read requests; only the leader accepts
    changes."""

    def __init__(
        self,
        common: Common,
        settings: RegistrySettings,
        blobs: BlobStore,
        database: Database,
        changes: RegistryChanges,
        garbage: GarbageCollector,
    ) -> None:
        self._common = common
        self._settings = settings
        self._blobs = blobs
        self._database = database
        self._changes = changes
        self._garbage = garbage

    def routes(self) -> list[Route]:
        guarded = partial(http.require_key, self._common)
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
            Route("/v1/versions/{version}", guarded(self.version)),
            Route("/v1/garbage", guarded(self.collect), methods=["POST"]),
            Route("/v1/audit", guarded(self.audited)),
        ]

    async def register(self, request: Request) -> Response:
        """Register a version. The response has status 201. If the version is to be served, replicas load and probe it
        afterwards."""
        body = await http.read_body(request, RegisterRequest)
        self._changes.require_leadership()
        name = request.path_params["name"]
        async with self._garbage.lock:
            try:
                manifest = await catalog.read_complete_manifest(self._blobs, body.manifest, name)
            except Unavailable as error:
                raise Refused(503, "unavailable", str(error)) from None

            async def work(tx: AsyncConnection, now: datetime, transition: Transition) -> str:
                version = await catalog.register(tx, now, transition, manifest, body.manifest, body.label)
                if body.serve:
                    record = await store.require_model(tx, name)
                    await catalog.serve(tx, transition, record, version, self._settings.served_max)
                return f"label {body.label}" if body.label else ""

            act = self._act(request, "register", manifest.version, body.why)
            return http.json_response(await self._changes.make(name, act, work), 201)

    async def serve(self, request: Request) -> Response:
        body = await http.read_body(request, ServeRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, transition: Transition, model: ModelRecord, version: VersionRecord
        ) -> None:
            await catalog.serve(tx, transition, model, version, self._settings.served_max)

        return await self._change_version(request, body.version, body.why, work)

    async def unserve(self, request: Request) -> Response:
        body = await http.read_body(request, ServeRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, transition: Transition, model: ModelRecord, version: VersionRecord
        ) -> None:
            await catalog.unserve(tx, transition, model, version)

        return await self._change_version(request, body.version, body.why, work)

    async def aliases(self, request: Request) -> Response:
        """Move aliases. If one of them does not name the expected version, none is moved, and the response is 409
        `alias_moved`."""
        body = await http.read_body(request, AliasesRequest)
        name = request.path_params["name"]

        async def work(tx: AsyncConnection, now: datetime, transition: Transition) -> str:
            record = await store.require_model(tx, name)
            return await catalog.move_aliases(tx, now, transition, record, body.moves, self._settings.served_max)

        return http.json_response(await self._changes.make(name, self._act(request, "aliases", None, body.why), work))

    async def retire(self, request: Request) -> Response:
        body = await http.read_body(request, RetireRequest)
        return await self._change_version(request, body.version, body.why, catalog.retire)

    async def tags(self, request: Request) -> Response:
        body = await http.read_body(request, TagsRequest)

        async def work(
            tx: AsyncConnection, _now: datetime, _transition: Transition, _model: ModelRecord, version: VersionRecord
        ) -> str:
            await catalog.change_tags(tx, version, body.add, body.remove)
            return " ".join([*(f"+{tag}" for tag in body.add), *(f"-{tag}" for tag in body.remove)])

        return await self._change_version(request, body.version, body.why, work)

    async def note(self, request: Request) -> Response:
        body = await http.read_body(request, NoteRequest)
        operator = audit.requester(request, self._common).who

        async def work(
            tx: AsyncConnection, now: datetime, _transition: Transition, _model: ModelRecord, version: VersionRecord
        ) -> None:
            await catalog.add_note(tx, now, version, body.text, operator)

        return await self._change_version(request, body.version, "", work)

    async def notes(self, request: Request) -> Response:
        async with self._database.transaction() as tx:
            record = await store.require_model(tx, request.path_params["name"])
            version = await store.require_version(tx, record, parameters_of(request, "version").get("version", ""))
            return http.json_response(NoteList(data=await store.notes(tx, version.version)))

    async def version(self, request: Request) -> Response:
        """Return the version with this full name, whatever its model."""
        name = request.path_params["version"]
        async with self._database.transaction() as tx:
            record = await store.require_model(tx, name.partition("@")[0])
            versions = [await store.require_version(tx, record, name)]
            return http.json_response(VersionList(data=await http.version_states(tx, versions)))

    async def collect(self, request: Request) -> Response:
        body = await http.read_body(request, GarbageRequest)
        self._changes.require_leadership()
        act = self._act(request, "collect", None, body.why)
        try:
            return http.json_response(await self._garbage.run(act, dry_run=body.dry_run))
        except Unavailable as error:
            raise Refused(
                503, "unavailable", f"garbage collection did not finish: {error}; send the request again"
            ) from None

    async def audited(self, request: Request) -> Response:
        parameters = parameters_of(request, "model", "before", "limit")
        before = http.number_parameter(parameters, "before", _NUMBER_MAX, _NUMBER_MAX)
        limit = http.limit_parameter(parameters)
        async with self._database.transaction() as tx:
            entries = await audit.read_entries(tx, parameters.get("model"), before, limit)
        return http.json_response(AuditList(data=entries))

    async def _change_version(self, request: Request, version_name: str, why: str, work: VersionChange) -> Response:
        name = request.path_params["name"]

        async def change(tx: AsyncConnection, now: datetime, transition: Transition) -> str | None:
            record = await store.require_model(tx, name)
            version = await store.require_version(tx, record, version_name)
            return await work(tx, now, transition, record, version)

        action = request.url.path.rpartition("/")[2]
        return http.json_response(await self._changes.make(name, self._act(request, action, version_name, why), change))

    def _act(self, request: Request, action: str, version: str | None, why: str) -> audit.AuditedAction:
        return audit.AuditedAction(audit.requester(request, self._common), action, version, why)
