"""Pages of the console, and the checks before the handler of a page runs: session, role and form token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from headrace_console.dead_letters import DeadLetterActions
from headrace_console.flow_rules import FlowRules
from headrace_console.logins import Logins
from headrace_console.pages.frame import Templates
from headrace_console.read_model.follower import RecordReader
from headrace_console.settings import Role, User
from headrace_console.sources.clients import GatewayClient, RegistryReader
from headrace_console.sources.replicas import ReplicaReader
from headrace_console.sources.services import StackReader
from headrace_console.sources.tokenizers import TokenizerReader
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_runtime.http.connections import mark_authenticated
from headrace_runtime.http.web import parameters_of
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.database import Database
from headrace_schemas.values.text import printable, storable

log = get_logger(__name__)
_FORM_BYTES_MAX = 1_048_576
_FORM_FIELDS_MAX = 200
_REASON_LENGTH_MAX = 2000


class NotFound(Refused):
    """The page or the record does not exist, or the user has no right to see it."""

    def __init__(self) -> None:
        super().__init__(404, "not_found", "There is nothing here for you. Check the address.")


class InvalidParameter(Refused):
    """A parameter of the query has a value that is not permitted."""

    def __init__(self, name: str, text: str, problem: str) -> None:
        super().__init__(400, "invalid_parameter", f"{name} = {printable(text)!r}: {problem}", name)


def choice_of(parameters: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Return the parameter `name`, or the first of `choices` if it is missing or empty.

    Raises:
        InvalidParameter: the value is not in `choices`.
    """
    text = parameters.get(name) or choices[0]
    if text not in choices:
        raise InvalidParameter(name, text, f"must be one of {', '.join(choices)}")
    return text


@dataclass(frozen=True, slots=True)
class Parts:
    """Components that the handlers of pages use. All requests share them."""

    templates: Templates
    database: Database
    records: RecordReader
    registry: RegistryReader
    gateway: GatewayClient
    replicas: ReplicaReader
    tokenizers: TokenizerReader
    letters: DeadLetterActions
    stack: StackReader
    rules: FlowRules
    clock: Clock
    computation: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that a handler holds during a long computation, so that only one runs at a time."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of a logged-in user for a page, with the components that handlers use."""

    parts: Parts
    request: Request
    user: User

    def path(self, name: str) -> str:
        """Return the parameter `name` of the URL path."""
        return str(self.request.path_params[name])

    def parameters(self, *names: str) -> dict[str, str]:
        """Return the parameters of the query. Raises `Refused` 400 for one that is not in `names`."""
        return parameters_of(self.request, *names)

    async def fields(self, names: Collection[str]) -> dict[str, str]:
        """Return the fields of the form. Raises `Refused` as `read_form`, and 400 for a field not in `names`."""
        form = await read_form(self.request)
        unknown = sorted(form.keys() - {"form_token", *names})
        if unknown:
            raise Refused(400, "invalid_form", f"form: has the unknown field {printable(unknown[0][:64])!r}", "form")
        return form

    async def reason(self) -> str:
        """Return the field `reason` of the form. Raises `Refused` 400 unless it has 1 to 2,000 characters."""
        reason = (await read_form(self.request)).get("reason", "").strip()
        if not 1 <= len(reason) <= _REASON_LENGTH_MAX:
            problem = f"State a reason of 1 to {_REASON_LENGTH_MAX:,} characters. It is kept in the audit log."
            raise Refused(400, "reason", problem, "reason")
        return storable(reason)

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Return a context with a new transaction of the read model."""
        return self.parts.database.transaction()

    def render(self, template: str, status: int = 200, **values: object) -> Response:
        """Return the page that a template renders with these values."""
        return self.parts.templates.render(self.request, self.user, template, status, **values)


Handler = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A route of the console: path, method and the handler that renders it.

    The handler may raise `Refused`. `role` is the lowest role of a user that may open the page.
    """

    path: str
    handler: Handler
    role: Role = "viewer"
    method: Literal["GET", "POST"] = "GET"
    is_change: bool = True
    """Whether a read-only console refuses the `POST`."""


class PageRoutes:
    """Factory of routes for pages. A route checks session, role, form token and `read_only` before the handler runs."""

    def __init__(self, parts: Parts, logins: Logins, *, read_only: bool) -> None:
        self._parts = parts
        self._logins = logins
        self._read_only = read_only

    def route(self, page: Page) -> Route:
        """Return the Starlette route of a page, which runs the checks before the page's handler."""

        async def endpoint(request: Request) -> Response:
            user = self._logins.user_of(request.cookies.get(cookie_name(request)))
            if user is None:
                return RedirectResponse("/login", 303, {"hx-redirect": "/login"})
            mark_authenticated(request.scope)
            try:
                await self._check(page, request, user)
                return await page.handler(Visit(self._parts, request, user))
            except Refused as error:
                return self._parts.templates.error(request, user, error)
            except Exception:
                log.exception("page failed", path=request.url.path)
                problem = f"{printable(request.url.path)}: the console failed to make this page. Read its log."
                return self._parts.templates.error(request, user, Refused(500, "internal_error", problem))

        return Route(page.path, endpoint, methods=[page.method])

    async def _check(self, page: Page, request: Request, user: User) -> None:
        if page.method == "POST":
            form = await read_form(request)
            if not hmac.compare_digest(form.get("form_token", "").encode(), user.form_token.encode()):
                raise Refused(403, "form_expired", "This form is of an earlier login. Open the page again.")
            if self._read_only and page.is_change:
                raise Refused(403, "read_only", "This console is read-only (console.read_only).")
        if not user.has_role(page.role):
            raise Refused(403, "role", f"This needs the role {page.role}; {user.name} has the role {user.role}.")


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Repeated calls return the same fields.

    Raises:
        Refused: the form is too large (413), or a field is repeated or is not text (400).
    """
    form: dict[str, str] | None = getattr(request.state, "form", None)
    if form is None:
        form = request.state.form = _parse_form(await _read_body(request))
    return form


async def _read_body(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _FORM_BYTES_MAX:
            raise Refused(413, "body_too_large", f"The form is larger than {_FORM_BYTES_MAX:,} bytes.")
    return bytes(content)


def _parse_form(content: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            content.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FORM_FIELDS_MAX
        )
    except ValueError:
        raise Refused(400, "invalid_form", "The form cannot be read. Send it from the page.") from None
    form = dict(pairs)
    if len(form) != len(pairs) or any("\0" in value for value in form.values()):
        raise Refused(400, "invalid_form", "A field of the form is repeated or contains NUL.")
    return form


def cookie_name(request: Request, *, kind: str = "headrace") -> str:
    """Return the name of a cookie of this console. It contains the port, because browsers share cookies between
    ports.
    """
    server = request.scope.get("server")
    name = f"{kind}-{server[1]}" if server else kind
    return f"__Host-{name}" if request.app.state.behind_tls else name
