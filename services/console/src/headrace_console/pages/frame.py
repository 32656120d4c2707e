"""Rendering of pages: the Jinja templates, and the frame that all pages share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headrace_console.settings import User
from headrace_runtime.errors import Refused
from headrace_schemas.values.text import printable, printable_lines

TEMPLATES = Path(__file__).parents[1] / "templates"
NAVIGATION = (
    ("Loop", "/", "l"),
    ("Why", "/flow", "w"),
    ("Sessions", "/sessions", "s"),
    ("Rewards", "/rewards", "r"),
    ("Models", "/models", "m"),
    ("Rollouts", "/rollouts", "o"),
    ("Review", "/review", "v"),
    ("Dead letters", "/dead-letters", "d"),
)
"""Title and address of each page in the navigation, and the key that opens it after the key g."""
_RATER_NAVIGATION = (("Review", "/review", "v"),)
_KEYS = (
    ("j k", "Next and previous row of a list, or turn of a session"),
    ("Enter", "Open the row with the focus"),
    ("?", "Show these keys"),
    ("/", "Find an id, a task or a version"),
    ("e", "Score or edit the turn with the focus, or the first turn"),
)
"""Keys and their meaning. Raters have the first three."""
THEMES = ("light", "dark")
LINES_LENGTH_MAX = 20_000
"""Largest number of characters of a text on a page, and of an answer in a form for edits."""
_FRAGMENT_HEADER = "hx-request"


@functools.cache
def _load_templates() -> jinja2.Environment:
    """Compile all templates once per process.

    Compilation takes 0.2 s. If templates were read later, an upgrade of the package would mix those of two releases.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        # One line of at most 200 characters, and several lines, with control and bidi characters as visible symbols.
        "visible": lambda text: printable(str(text)),
        "lines": lambda text: printable_lines(str(text), LINES_LENGTH_MAX),
        "moment": lambda time: f"{time.astimezone(UTC):%d %b %Y %H:%M:%S} UTC",
        "minute": lambda time: f"{time.astimezone(UTC):%d %b %Y %H:%M}",
        "iso": lambda time: time.astimezone(UTC).isoformat(),
        "exp": math.exp,
    }
    environment.globals["ui"] = environment.get_template("macros.html").module
    for name in environment.list_templates():
        environment.get_template(name)
    return environment


class Templates:
    """Renderer of pages. All values in a template are escaped, and undefined names raise an error."""

    def __init__(self, *, behind_tls: bool = False) -> None:
        self._environment = _load_templates()
        self._theme_cookie = "__Host-headrace-theme" if behind_tls else "headrace-theme"

    @property
    def theme_cookie(self) -> str:
        """Name of the cookie with the theme."""
        return self._theme_cookie

    def render(self, request: Request, user: User | None, name: str, status: int = 200, **values: object) -> Response:
        """Return a page. A request of htmx gets only the template's block `live`, where it has one."""
        template = self._environment.get_template(name)
        context = {**self._frame(request, user), **values}
        is_fragment = request.headers.get(_FRAGMENT_HEADER) == "true" and "live" in template.blocks
        if not is_fragment:
            return HTMLResponse(template.render(context), status)
        return HTMLResponse("".join(template.blocks["live"](template.new_context(context))), status)

    def error(self, request: Request, user: User | None, error: Refused) -> Response:
        """Return the error page of a refused request."""
        return self.render(request, user, "error.html", error.status, error=error)

    def _frame(self, request: Request, user: User | None) -> Mapping[str, object]:
        theme = request.cookies.get(self._theme_cookie, "")
        is_rater = user is not None and not user.has_role("viewer")
        return {
            "user": user,
            "path": request.url.path,
            "navigation": () if user is None else _RATER_NAVIGATION if is_rater else NAVIGATION,
            "keys": _KEYS[:3] if is_rater else _KEYS,
            "theme": theme if theme in THEMES else "",
            "themes": THEMES,
        }
