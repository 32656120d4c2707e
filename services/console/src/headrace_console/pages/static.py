"""Style, scripts and icon of the pages. They need no session."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

_FOLDER = Path(__file__).parents[1] / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def static_route() -> Route:
    """Return the route of the files, which are read once. A browser that has a file gets 304 as long as it is equal."""
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in files.items()}

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return PlainTextResponse("There is no such file.\n", 404)
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=headers)

    return Route("/static/{name}", file)
