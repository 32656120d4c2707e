"""`GET /v1/models` and `GET /v1/models/{id}`: every name that a request's `model` may be."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.admission import Admission
from headrace_gateway.model_catalog import ModelCatalog
from headrace_gateway.requests import headers_of
from headrace_schemas import Routing


@dataclass(frozen=True, slots=True)
class ModelsApi:
    """Reads the routing table; needs the scope `chat`."""

    admission: Admission
    catalog: ModelCatalog

    async def list(self, request: Request) -> Response:
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        models = [self._model(name, routing) for name, routing in self.catalog.names(caller.may_use)]
        return JSONResponse({"object": "list", "data": models})

    async def one(self, request: Request) -> Response:
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        wanted = request.path_params["model"]
        self.catalog.resolve(wanted, caller.may_use)  # raises 404
        routing = dict(self.catalog.names())[wanted]
        return JSONResponse(self._model(wanted, routing))

    def _model(self, name: str, routing: Routing) -> dict[str, JsonValue]:
        return {
            "id": name,
            "object": "model",
            "created": int(routing.time.timestamp()),
            "owned_by": "headrace",
            "version": self.catalog.version_of(self.catalog.resolve(name)),
        }
