"""HTTP that every service has: `/health`, `/metrics`, and uvicorn inside the service's own event loop.

uvicorn runs on h11: with httptools, a request that offers `Upgrade: h2c` (every JDK HTTP client) loses its body
(https://github.com/Kludex/uvicorn/issues/2722).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_runtime import disk
from headrace_runtime.errors import Refused, SettingError, Unavailable
from headrace_runtime.http_protocol import protocol_for
from headrace_runtime.settings import Common, SecuritySettings, ServiceSettings, is_loopback
from headrace_runtime.web_guard import WebGuard
from headrace_schemas.names import decode_name, decode_path, decode_segment
from headrace_schemas.redaction import redacted
from headrace_schemas.text import closest, printable

_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
Holds = bool | str
Check = Callable[[], Holds | Awaitable[Holds]]
"""Whether something holds: True, or False or the reason why it does not."""


def app(
    checks: Mapping[str, Check],
    routes: Sequence[BaseRoute] = (),
    common: Common | None = None,
    *,
    needs_disk: bool = True,
    notes: Mapping[str, Check] | None = None,
) -> Starlette:
    """An application with the common pages. `/health` is 200 when every check holds, else 503 and says which do not.

    What does not hold of `notes` is said among the reasons; the service is ready all the same.

    With `common`, the disk under `data_dir` is one of the checks, where the service does its work without it
    (`needs_disk`) only among the reasons, and `/metrics` needs the internal key where one is
    set: its labels name models, tenants' keys and replicas.
    """

    async def health(_request: Request) -> Response:
        results = {name: await _hold(check) for name, check in checks.items()}
        room = await _disk(common) if common else True
        if needs_disk and common:
            results["disk"] = room
        healthy = all(result is True for result in results.values())
        noted = {name: await _hold(note) for name, note in (notes or {}).items()}
        said_of = {**results, **noted, "disk": room}
        reasons = {name: redacted(why) for name, why in said_of.items() if isinstance(why, str)}
        said: dict[str, object] = {
            "status": "ok" if healthy else "unready",
            "checks": {name: result is True for name, result in results.items()},
            **({"reasons": reasons} if reasons else {}),
        }
        return JSONResponse(said, 200 if healthy else 503)

    async def metrics(request: Request) -> Response:
        if common is not None:
            require_internal_key(request, common)
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/health", health), Route("/metrics", metrics), *routes],
        exception_handlers={Refused: _refused},
        middleware=[Middleware(_StorableNames)],
    )


@contextlib.asynccontextmanager
async def serve(
    application: ASGIApp, settings: ServiceSettings, security: SecuritySettings | None = None
) -> AsyncIterator[int]:
    """Listen while the body runs; yields the port. Open requests get a few seconds to end afterwards.

    What a web page sends is refused (`web_guard`), but for origins and hosts that `security` names.

    A socket that was handed over (sd_listen_fds(3)) is used in place of one of our own; `headrace up` holds the
    gateway's that way, so that callers wait while it is started again. Raises `Unavailable` when the address cannot
    be had, `SettingError` when the socket is another one than the settings say.
    """
    listener = _listen(settings)
    server = _Server(
        uvicorn.Config(
            WebGuard(_with_exact_paths(application), settings, security or SecuritySettings()),
            http=protocol_for(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
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
    handed_over = _handed_over(settings)
    if handed_over is not None:
        return handed_over
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error


def _handed_over(settings: ServiceSettings) -> socket.socket | None:
    """The first socket that the process was started with, for this process alone: what it starts does not see it."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or int(os.environ.get("LISTEN_FDS", "0")) < 1:
        return None
    for name in ("LISTEN_PID", "LISTEN_FDS"):
        del os.environ[name]
    listener = socket.socket(fileno=_FIRST_HANDED_OVER)
    listener.set_inheritable(False)
    host, port = listener.getsockname()[:2]
    if settings.port not in (0, port):
        raise SettingError("port", settings.port, f"the socket that was handed over listens on {host}:{port}")
    if is_loopback(settings.host) and not is_loopback(host):
        raise SettingError("host", settings.host, f"the socket that was handed over listens on {host}:{port}")
    return listener


def require_internal_key(request: Request, common: Common) -> None:
    """Raises `Refused` unless the request carries `security.internal_key`, when one is set."""
    expected = common.security.internal_key.get_secret_value()
    given = header_of(request, "authorization").removeprefix("Bearer ")
    if expected and not hmac.compare_digest(expected.encode(), given.encode()):
        raise Refused(401, "invalid_api_key", "this endpoint needs the bearer token of security.internal_key")


def header_of(request: Request, name: str) -> str:
    """Return a header's value by the rule of `headrace_schemas.names`, empty where the request has no such header."""
    wanted = name.lower().encode("ascii")
    return next((decode_name(value) for header, value in request.headers.raw if header == wanted), "")


def parameters_of(request: Request, *names: str) -> dict[str, str]:
    """Return the query parameters of a request, decoded by the rule of `headrace_schemas.names`.

    Raises `Refused` 400 for a parameter that is not one of `names`, and for one that has two different values.
    """
    raw: bytes = request.scope.get("query_string", b"")
    found: dict[str, str] = {}
    for pair in filter(None, raw.split(b"&")):
        name, value = (decode_segment(part.replace(b"+", b" ")) for part in pair.partition(b"=")[::2])
        if name not in names:
            similar = closest(name, names)
            hint = f"did you mean {similar!r}?" if similar else f"this page takes {', '.join(names) or 'none'}"
            text = f"unknown query parameter '{printable(name)}'; {hint}"
            raise Refused(400, "unknown_parameter", text, printable(name))
        if found.setdefault(name, value) != value:
            raise Refused(400, "repeated_parameter", f"{name}: two different values; send one", name)
    return found


class _StorableNames:
    """Middleware that refuses a path or a query with NUL: pages look such names up, and PostgreSQL raises an error."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query: bytes = scope.get("query_string") or b""
            for part, has_nul in (("path", "\0" in scope["path"]), ("query", b"%00" in query or b"\0" in query)):
                if has_nul:
                    error = Refused(400, "invalid_value", f"{part}: must not contain NUL; remove %00", part)
                    await (await _refused(Request(scope), error))(scope, receive, send)
                    return
        await self._application(scope, receive, send)


def _with_exact_paths(application: ASGIApp) -> ASGIApp:
    """Return `application` with paths whose percent forms are decoded by the rule of `headrace_schemas.names`."""

    async def exact(scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if b"%" in raw:
            scope = {**scope, "path": decode_path(raw)}
        await application(scope, receive, send)

    return exact


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the service's own main handles signals


async def _hold(check: Check) -> Holds:
    result = check()
    return await result if inspect.isawaitable(result) else result


async def _disk(common: Common) -> Holds:
    return await asyncio.to_thread(disk.trouble, common.data_dir.absolute(), common.disk_free_bytes_min) or True


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    body = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": error.param}
    return JSONResponse({"error": body}, error.status)
