"""HTTP server that every service uses: `/health`, `/metrics`, `/settings`, uvicorn inside the service's own event loop,
and the counters of reward sources that scorer and judge return under `/sources`.

uvicorn uses h11, because with httptools a request that offers `Upgrade: h2c` (every JDK HTTP client) loses its body
(https://github.com/Kludex/uvicorn/issues/2722).

Of consecutive failures of a reward source, the first, the 10th, 100th and so on are logged, and the first success after
them. Counts begin with the process; the metrics and the topic `rewards` contain the history.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import inspect
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, JsonValue
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_runtime.clock import Clock, SystemClock
from headrace_runtime.errors import Refused, SettingError, Unavailable
from headrace_runtime.http.connections import ConnectionLimits, mark_authenticated
from headrace_runtime.http.guard import BrowserLogin, WebGuard
from headrace_runtime.http.protocol import TimedProtocol
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common, SecuritySettings, ServiceSettings, is_loopback
from headrace_runtime.storage import disk
from headrace_schemas.http.registry_api import SourceList, SourceState
from headrace_schemas.values.errors import HIDDEN, is_secret, redact
from headrace_schemas.values.ids import decode_name, decode_path, decode_segment
from headrace_schemas.values.text import closest, printable

_BACKLOG = 2048
_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
CheckResult = bool | str
"""Result of a health check: True if it passes, otherwise False or the reason of the failure."""
Check = Callable[[], CheckResult | Awaitable[CheckResult]]


def app(
    checks: Mapping[str, Check],
    routes: Sequence[BaseRoute] = (),
    common: Common | None = None,
    *,
    needs_disk: bool = True,
    notes: Mapping[str, Check] | None = None,
) -> Starlette:
    """Create the application of a service with the pages that all services have.

    `/health` responds 200 if all checks pass, otherwise 503 with the failed checks. With `common`, `/metrics` requires
    the internal key if one is set, because its labels name models, tenants' keys and replicas.

    Args:
        checks: the checks of the service's health.
        routes: the service's own routes.
        common: the common settings. With them `/health` also checks the disk of `data_dir`.
        needs_disk: whether the service is unready if the disk check fails. Otherwise the reason is only reported.
        notes: further checks whose failures are reported but do not make the service unready.
    """

    async def health(_request: Request) -> Response:
        results = {name: await _run_check(check) for name, check in checks.items()}
        disk_result = await _check_disk(common) if common else True
        if needs_disk and common:
            results["disk"] = disk_result
        healthy = all(result is True for result in results.values())
        note_results = {name: await _run_check(note) for name, note in (notes or {}).items()}
        all_results = {**results, **note_results, "disk": disk_result}
        reasons = {name: redact(result) for name, result in all_results.items() if isinstance(result, str)}
        body: dict[str, object] = {
            "status": "ok" if healthy else "unready",
            "checks": {name: result is True for name, result in results.items()},
            **({"reasons": reasons} if reasons else {}),
        }
        return JSONResponse(body, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        if common is not None:
            require_internal_key(request, common)
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/health", health), Route("/metrics", metrics), *routes],
        exception_handlers={Refused: _refusal_response},
        middleware=[Middleware(_StorableNames)],
    )


@contextlib.asynccontextmanager
async def serve(
    application: ASGIApp,
    settings: ServiceSettings,
    security: SecuritySettings | None = None,
    *,
    accepts_forms: bool = False,
) -> AsyncIterator[int]:
    """Serve `application` while the body runs, and yield the port. On exit, open requests get a few seconds to end.

    Requests of web pages are refused (`guard`), except from origins and hosts that `security` names. With
    `accepts_forms`, forms of the application's own pages are accepted, and browsers are not asked for a password
    (`browser_login`), because such an application has a login page, which its status 401 shows.

    A socket that the process inherited (sd_listen_fds(3)) is used in place of a new one. `headrace up` keeps the
    gateway's socket open in this way, so that callers wait while the gateway restarts.

    Raises:
        Unavailable: the address is not available.
        SettingError: the inherited socket has another address than the settings.
    """
    listener = _listen(settings)
    limits = ConnectionLimits()
    guarded = _with_exact_paths(application)
    server = _Server(
        uvicorn.Config(
            WebGuard(
                guarded if accepts_forms else BrowserLogin(guarded),
                settings,
                security or SecuritySettings(),
                accepts_forms=accepts_forms,
            ),
            http=functools.partial(TimedProtocol, limits),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            backlog=min(_BACKLOG, limits.connections_max // 2),  # asyncio accepts as many at once, above the limit
            timeout_graceful_shutdown=10,
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if running.done():
                running.result()
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running


def _listen(settings: ServiceSettings) -> socket.socket:
    inherited = _take_inherited_socket(settings)
    if inherited is not None:
        return inherited
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error


def _take_inherited_socket(settings: ServiceSettings) -> socket.socket | None:
    """Return the first socket that the process inherited, or None. Child processes of this process will not inherit
    it."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or int(os.environ.get("LISTEN_FDS", "0")) < 1:
        return None
    for name in ("LISTEN_PID", "LISTEN_FDS"):
        del os.environ[name]
    listener = socket.socket(fileno=_FIRST_HANDED_OVER)
    listener.set_inheritable(False)
    host, port = listener.getsockname()[:2]
    if settings.port not in (0, port):
        raise SettingError("port", settings.port, f"the inherited socket listens on {host}:{port}")
    if is_loopback(settings.host) and not is_loopback(host):
        raise SettingError("host", settings.host, f"the inherited socket listens on {host}:{port}")
    return listener


def require_internal_key(request: Request, common: Common) -> None:
    """Check that the request contains `security.internal_key`, if that is set. Raises `Refused` 401."""
    expected = common.security.internal_key.get_secret_value()
    token = header_of(request, "authorization").removeprefix("Bearer ")
    if expected and not hmac.compare_digest(expected.encode(), token.encode()):
        raise Refused(401, "invalid_api_key", "this endpoint needs the bearer token of security.internal_key")
    if expected:
        mark_authenticated(request.scope)


def header_of(request: Request, name: str) -> str:
    """Return a header's value as a text, decoded as in `headrace_schemas.values.ids`; empty without the header."""
    raw_name = name.lower().encode("ascii")
    return next((decode_name(value) for header, value in request.headers.raw if header == raw_name), "")


def parameters_of(request: Request, *names: str) -> dict[str, str]:
    """Return the query parameters of a request, decoded as in `headrace_schemas.values.ids`.

    Raises:
        Refused: a parameter is not one of `names` or has two different values (status 400).
    """
    raw: bytes = request.scope.get("query_string", b"")
    parameters: dict[str, str] = {}
    for pair in filter(None, raw.split(b"&")):
        name, value = (decode_segment(part.replace(b"+", b" ")) for part in pair.partition(b"=")[::2])
        if name not in names:
            similar = closest(name, names)
            hint = f"did you mean {similar!r}?" if similar else f"this page accepts {', '.join(names) or 'none'}"
            text = f"unknown query parameter '{printable(name)}'; {hint}"
            raise Refused(400, "unknown_parameter", text, printable(name))
        if parameters.setdefault(name, value) != value:
            raise Refused(400, "repeated_parameter", f"{name}: two different values; send one", name)
    return parameters


class _StorableNames:
    """Middleware that refuses a path or a query with NUL, for which PostgreSQL would raise an error."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query: bytes = scope.get("query_string") or b""
            for part, has_nul in (("path", "\0" in scope["path"]), ("query", b"%00" in query or b"\0" in query)):
                if has_nul:
                    error = Refused(400, "invalid_value", f"{part}: must not contain NUL; remove %00", part)
                    await (await _refusal_response(Request(scope), error))(scope, receive, send)
                    return
        await self._application(scope, receive, send)


def _with_exact_paths(application: ASGIApp) -> ASGIApp:
    """Return `application` wrapped so that it gets paths decoded as in `headrace_schemas.values.ids`."""

    async def exact(scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if b"%" in raw:
            scope = {**scope, "path": decode_path(raw)}
        await application(scope, receive, send)

    return exact


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `headrace_runtime.main` handles signals


async def _run_check(check: Check) -> CheckResult:
    result = check()
    return await result if inspect.isawaitable(result) else result


async def _check_disk(common: Common) -> CheckResult:
    return await asyncio.to_thread(disk.problem, common.data_dir.absolute(), common.disk_free_bytes_min) or True


async def _refusal_response(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    body = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": error.param}
    return JSONResponse({"error": body}, error.status)


def settings_route(service: str, settings: BaseModel, common: Common) -> Route:
    """Return the route `GET /settings`. It requires the internal key if one is set."""

    async def page(request: Request) -> Response:
        require_internal_key(request, common)
        return JSONResponse({"service": service, "settings": public_settings(settings)})

    return Route("/settings", page)


def public_settings(settings: BaseModel) -> dict[str, JsonValue]:
    """Return all settings by name as JSON values. Secrets, by their type or their name, and passwords in URLs are
    hidden."""
    values: dict[str, JsonValue] = settings.model_dump(mode="json")
    return {name: _without_secrets(name, value) for name, value in values.items()}


def _without_secrets(name: str, value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {inner: _without_secrets(inner, item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else redact(value)


log = get_logger(__name__)
_FINE = frozenset({"scored", "abstained"})
_QUOTES = frozenset({"parse_error"})
"""Outcomes whose reason may quote a model's text. The reason is not logged, because logs must not contain text of
runs."""
RETRIED = "retried"
_SOURCES_MAX = 256
_ERROR_LENGTH_MAX = 2000


@dataclass
class _Source:
    outcomes: Counter[str] = field(default_factory=Counter)
    failing: int = 0
    last_error: str | None = None
    last_error_at: datetime | None = None


class Sources:
    """Counters of the outcomes of each reward source of a service, with the last error of each."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._sources: dict[str, _Source] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Register reward sources, so that `GET /sources` lists them before their first result."""
        for name in names:
            self._sources.setdefault(name, _Source())

    def note(self, name: str, outcome: str, reason: str | None) -> None:
        """Count one outcome of a source: a value of `Reward.outcome`, or `retried`. Log it if it is a first or a round
        number of failures, or the first success after failures."""
        if name not in self._sources and len(self._sources) >= _SOURCES_MAX:
            self._sources.pop(next(iter(self._sources)))
        source = self._sources.setdefault(name, _Source())
        source.outcomes[outcome] += 1
        if outcome in _FINE:
            if source.failing:
                log.info("source_works_again", source=name, failed_in_a_row=source.failing)
            source.failing = 0
            return
        source.failing += 1
        source.last_error = (reason or outcome)[:_ERROR_LENGTH_MAX]
        source.last_error_at = self._clock.now()
        if _is_power_of_ten(source.failing):
            error = None if outcome in _QUOTES else source.last_error
            log.warning("source_fails", source=name, outcome=outcome, in_a_row=source.failing, error=error)

    def source_list(self) -> SourceList:
        """Return the counters and the last error of each source."""
        return SourceList(
            data=tuple(
                SourceState(
                    id=name,
                    outcomes=dict(source.outcomes),
                    failing=source.failing,
                    last_error=source.last_error,
                    last_error_at=source.last_error_at,
                )
                for name, source in self._sources.items()
            )
        )

    def route(self, common: Common) -> Route:
        """Return the route `GET /sources`. It requires the internal key, because an error may quote user text."""

        async def sources(request: Request) -> Response:
            require_internal_key(request, common)
            return Response(self.source_list().model_dump_json(exclude_none=True), media_type="application/json")

        return Route("/sources", sources)


def _is_power_of_ten(number: int) -> bool:
    return number > 0 and str(number).strip("0") == "1"
