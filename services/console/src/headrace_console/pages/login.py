"""Login, logout and theme."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from headrace_console.logins import SESSION_S, Logins
from headrace_console.pages.frame import THEMES, Templates
from headrace_console.pages.page import Page, Visit, cookie_name, read_form
from headrace_runtime.errors import Refused
from headrace_runtime.http.web import parameters_of

_THEME_S = 400 * 24 * 3600


class LoginPages:
    """Pages that begin and end login sessions, and the choice of the theme."""

    def __init__(self, templates: Templates, logins: Logins, *, has_users: bool, behind_tls: bool) -> None:
        self._templates = templates
        self._logins = logins
        self._has_users = has_users
        self._behind_tls = behind_tls

    def routes(self) -> list[Route]:
        """Return the routes that users may open before they have logged in."""
        return [
            Route("/login", self._with_error_page(self.form), methods=["GET"]),
            Route("/login", self._with_error_page(self.log_in), methods=["POST"]),
        ]

    def pages(self) -> list[Page]:
        """Return the pages that need a login but no particular role."""
        return [
            Page("/logout", self.log_out, role="rater", method="POST", is_change=False),
            Page("/theme", self.theme, role="rater", method="POST", is_change=False),
        ]

    async def form(self, request: Request) -> Response:
        """Log in with the one-time token in the URL query, or show the login form."""
        if (token := parameters_of(request, "token").get("token")) is not None:
            return self._redirect_with_session(request, self._logins.log_in_once(token, _address_of(request)))
        return self._templates.render(request, None, "login.html", has_users=self._has_users)

    async def log_in(self, request: Request) -> Response:
        """Log in with the token of a user. The web guard has checked that the console's own page sent the form."""
        form = await read_form(request)
        return self._redirect_with_session(request, self._logins.log_in(form.get("token", ""), _address_of(request)))

    async def log_out(self, visit: Visit) -> Response:
        """End the login session."""
        name = cookie_name(visit.request)
        self._logins.log_out(visit.request.cookies.get(name, ""))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(name, secure=self._behind_tls, httponly=True, samesite="strict")
        return response

    async def theme(self, visit: Visit) -> Response:
        """Store the theme in a cookie. Without a valid theme, delete the cookie, so that the system's theme applies."""
        form = await read_form(visit.request)
        response = RedirectResponse(_local_path(form.get("next", "")), 303)
        name, theme = self._templates.theme_cookie, form.get("theme", "")
        if theme in THEMES:
            response.set_cookie(name, theme, max_age=_THEME_S, secure=self._behind_tls, httponly=True, samesite="lax")
        else:
            response.delete_cookie(name, secure=self._behind_tls, httponly=True, samesite="lax")
        return response

    def _redirect_with_session(self, request: Request, cookie: str) -> Response:
        user = self._logins.user_of(cookie)
        home = "/" if user is not None and user.has_role("viewer") else "/review"
        response = RedirectResponse(home, 303, {"referrer-policy": "no-referrer"})
        response.set_cookie(
            cookie_name(request),
            cookie,
            max_age=SESSION_S,
            secure=self._behind_tls,
            httponly=True,
            samesite="strict",
        )
        return response

    def _with_error_page(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Refused as error:
                return self._templates.render(
                    request, None, "login.html", error.status, has_users=self._has_users, error=error
                )

        return endpoint


def _address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _local_path(path: str) -> str:
    """Return `path` if it is a path of this console, otherwise `/`, for example for the address of another site."""
    parts = urlsplit(path)
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and not parts.scheme and not parts.netloc
    return path if is_local and path.isascii() and path.isprintable() else "/"
