"""Composition root of the console: logins, readers of other services, pages and their server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_console.dead_letters import DeadLetterActions
from headrace_console.flow_rules import FlowRules
from headrace_console.live import Changes
from headrace_console.logins import Logins
from headrace_console.pages import (
    dead_letters,
    feedback,
    loop,
    models,
    review,
    review_queues,
    rewards,
    rollouts,
    session,
    sessions,
    turns,
)
from headrace_console.pages.frame import Templates
from headrace_console.pages.login import LoginPages
from headrace_console.pages.page import NotFound, Page, PageRoutes, Parts, Visit
from headrace_console.read_model.follower import RecordReader, TopicFollower
from headrace_console.settings import ConsoleSettings
from headrace_console.sources.clients import GatewayClient, RegistryReader
from headrace_console.sources.replicas import ReplicaReader
from headrace_console.sources.services import StackReader
from headrace_console.sources.tokenizers import TokenizerReader
from headrace_runtime.clock import Clock, SystemClock
from headrace_runtime.http import web
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.process.logs import get_logger
from headrace_runtime.services import installed_services
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import database, disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas import TrainingMetrics

log = get_logger(__name__)
_MODULES = (
    loop, models, rollouts, sessions, session, turns, feedback, review_queues, review, dead_letters, rewards,
)  # fmt: skip
"""Modules of the pages. Of two pages that match an address, the one of the earlier module is shown."""
_WATCH_INTERVAL_S = 2.0
"""Seconds between two readings of the services' state while a browser follows changes."""


async def run(common: Common, settings: ConsoleSettings) -> None:
    """Run the console until cancelled."""
    console = Console(common, settings, SystemClock())
    await disk.retry_while_full(lambda: database.migrate(console.database, "headrace_console"))
    # Pages of other origins must not call the console, even if `security.origins` lets them call other services.
    security = common.security.model_copy(update={"origins": ()})
    async with web.serve(SecurityHeaders(console.app), settings, security, accepts_forms=True) as port:
        log.info("listening", port=port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(console.watch())
                group.create_task(console.follower.run())
                group.create_task(console.replicas.table.run())
        finally:
            console.changes.close()
            await console.close()


class Console:
    """The console without its HTTP server. `app` is its ASGI application, to which the server adds checks of the
    origin.
    """

    def __init__(self, common: Common, settings: ConsoleSettings, clock: Clock) -> None:
        self._clock = clock
        self.changes = Changes()
        self._has_training_report = True
        key = common.security.internal_key.get_secret_value()
        self.logins = Logins(common.data_dir, settings.users, clock, stack_key=key)
        self._stack = StackReader(common, settings, installed_services(), clock)
        registry = RegistryReader(self._stack.url("registry"), key, clock)
        keys = {tenant: secret.get_secret_value() for tenant, secret in settings.gateway_keys.items()}
        gateway = GatewayClient(self._stack.url("gateway"), keys, key)
        self.database = Database.open("console", common)
        blobs = BlobStore.open(common)
        self._records = RecordReader(common.bus, blobs, clock)
        self.follower = TopicFollower(
            common.bus,
            self.database,
            blobs,
            clock,
            self._announce,
            titles=settings.titles,
            retention_days=settings.retention_days,
        )
        self.replicas = ReplicaReader(common, blobs, clock)
        producer = EventProducer(common.bus, "headrace/dead-letters", blobs)
        self._letters = DeadLetterActions(self._records, producer, blobs, clock)
        templates = Templates(behind_tls=settings.behind_tls)
        login = LoginPages(templates, self.logins, has_users=bool(settings.users), behind_tls=settings.behind_tls)
        self.pages = [
            *login.pages(),
            *(page for module in _MODULES for page in module.PAGES),
            Page("/live", self._stream, role="rater"),
            Page("/{path:path}", _not_found, role="rater"),
        ]
        parts = Parts(
            templates=templates,
            database=self.database,
            records=self._records,
            registry=registry,
            gateway=gateway,
            replicas=self.replicas,
            tokenizers=TokenizerReader(registry, blobs),
            letters=self._letters,
            stack=self._stack,
            rules=FlowRules.read(common),
            clock=clock,
        )
        routes = PageRoutes(parts, self.logins, read_only=settings.read_only)
        checks: dict[str, web.Check] = {
            "database": self.database.ready,
            "consumer": self.follower.following.is_set,
        }
        self.app: Starlette = web.app(
            checks,
            [
                static_route(),
                *login.routes(),
                *(routes.route(page) for page in self.pages),
            ],
            common,
        )
        self.app.state.behind_tls = settings.behind_tls

    async def watch(self) -> None:
        """Read the state of all services periodically and announce changes to browsers, until cancelled.

        While no browser follows changes, the state is read only after a report of the trainer. These readings give
        `Progress` the counters at the time of the last trained experience.
        """
        last_report = None
        while True:
            await self._clock.sleep(_WATCH_INTERVAL_S)
            if not (self.changes.is_watched or self._has_training_report):
                continue
            self._has_training_report = False
            report = await self._stack.report()
            if report != last_report:
                last_report = report
                self.changes.announce("loop")

    def _announce(self, topics: Collection[str]) -> None:
        self.changes.announce("sessions")
        self._has_training_report |= TrainingMetrics.topic in topics

    async def close(self) -> None:
        """Close the database and the connections to the bus."""
        await self._letters.close()
        await self._records.close()
        await self.database.close()

    async def _stream(self, _visit: Visit) -> Response:
        return StreamingResponse(self.changes.stream(), media_type="text/event-stream")


async def _not_found(_visit: Visit) -> Response:
    raise NotFound


_STATIC_FOLDER = Path(__file__).parent / "static"
_STATIC_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def static_route() -> Route:
    """Return the route of the static files, which are read once, at the start.

    A browser that sends the digest of its copy gets 304 if the file has the same digest.
    """
    files = {path.name: path.read_bytes() for path in _STATIC_FOLDER.iterdir() if path.suffix in _STATIC_TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in files.items()}

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return PlainTextResponse("There is no such file.\n", 404)
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=_STATIC_TYPES[Path(name).suffix], headers=headers)

    return Route("/static/{name}", file)


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_DEFAULTS = {b"cache-control": b"no-store", b"referrer-policy": b"same-origin"}


class SecurityHeaders:
    """Middleware that adds security headers: no inline script or style, no resource of another origin, no frame.

    Responses may have another cache rule or referrer policy. The policy is `same-origin` by default, because with
    `no-referrer` browsers send `Origin: null` with forms, which the web guard refuses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own_headers = list(message.get("headers", ()))
                names = {name for name, _ in own_headers}
                defaults = [(name, value) for name, value in _DEFAULTS.items() if name not in names]
                message = {**message, "headers": [*own_headers, *_HEADERS, *defaults]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
