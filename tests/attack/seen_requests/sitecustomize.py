"""Recorder in each service process: its routes, and every request of a browser that arrives or reaches a handler.

Python imports this module at its start when the folder is on the path. `SEEN_REQUESTS` names the folder for the
records; each process writes one file of JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_FOLDER = os.environ.get("SEEN_REQUESTS", "")


def _note(kind: str, **fields: object) -> None:
    arguments = sys.orig_argv
    service = arguments[arguments.index("-m") + 1] if "-m" in arguments else "other"
    with (Path(_FOLDER) / f"{service}.{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "service": service, **fields}) + "\n")


def _of_browser(scope: dict[str, Any]) -> bool:
    return scope["type"] == "http" and b"Chrome" in dict(scope["headers"]).get(b"user-agent", b"")


def _watch() -> None:
    from starlette.applications import Starlette

    from headrace_runtime.http.guard import WebGuard

    initialize, called, guarded = Starlette.__init__, Starlette.__call__, WebGuard.__call__

    def make(self: Any, *positional: Any, **named: Any) -> None:
        initialize(self, *positional, **named)
        for route in self.routes:
            _note("route", path=route.path, methods=sorted(route.methods or ()))

    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if _of_browser(scope):
            _note("reached", path=scope["path"], method=scope["method"])
        await called(self, scope, receive, send)

    async def guard(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if _of_browser(scope):
            _note("arrived", path=scope["path"], method=scope["method"])
        await guarded(self, scope, receive, send)

    Starlette.__init__, Starlette.__call__ = make, call  # type: ignore[method-assign]
    WebGuard.__call__ = guard  # type: ignore[method-assign]


if _FOLDER and any(argument.startswith("headrace_") for argument in sys.orig_argv):
    _watch()
