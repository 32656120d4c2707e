"""The endpoints of the models: `GET /v1/models` and `GET /v1/models/{model}`, in the form of OpenAI or of Anthropic."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.access.refusals import is_anthropic
from headrace_gateway.apis.admission import Admission
from headrace_gateway.requests.http_request import headers_of
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_schemas import Routing


@dataclass(frozen=True, slots=True)
class ModelsApi:
    """The endpoints of the models, which read the routing table and need the scope `chat`."""

    admission: Admission
    catalog: ModelCatalog

    async def list(self, request: Request) -> Response:
        """Return all models that the caller may use."""
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        rows = self.catalog.names(caller.may_use)
        if is_anthropic(request):
            names = [name for name, _ in rows]
            listed = [self._anthropic_model(name, routing) for name, routing in rows]
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            return JSONResponse({"data": listed, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [self._model(name, routing) for name, routing in rows]})

    async def get(self, request: Request) -> Response:
        """Return one model, by any name that a call may use. Raises `ApiError` 404."""
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        name = request.path_params["model"]
        routing = self.catalog.routing_of(self.catalog.resolve(name, caller.may_use, by_agent=True))
        form = self._anthropic_model if is_anthropic(request) else self._model
        return JSONResponse(form(name, routing))

    def _model(self, name: str, routing: Routing) -> dict[str, JsonValue]:
        return {
            "id": name,
            "object": "model",
            "created": int(routing.time.timestamp()),
            "owned_by": "headrace",
            "version": self.catalog.version_of(self.catalog.resolve(name, by_agent=True)),
        }

    def _anthropic_model(self, name: str, routing: Routing) -> dict[str, JsonValue]:
        created = routing.time.astimezone(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": created,
            "lifecycle": "active",
            "version": self.catalog.version_of(self.catalog.resolve(name, by_agent=True)),
        }
