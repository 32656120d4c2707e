"""`GET` and `DELETE /v1/responses/{id}`: the responses that are stored for references."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.admission import Admission
from headrace_gateway.refusals import ApiError
from headrace_gateway.requests import headers_of
from headrace_gateway.response_store import CallerResponses, ResponseStore
from headrace_schemas.values.text import printable


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The endpoints of stored responses, which need the scope `chat`."""

    admission: Admission
    store: ResponseStore

    async def get(self, request: Request) -> Response:
        """Return a stored response. Raises `ApiError` 404."""
        response_id = request.path_params["response_id"]
        stored = self._view(request).get(response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Drop a stored response. The captured turn stays. Raises `ApiError` 404."""
        response_id = request.path_params["response_id"]
        if not self._view(request).delete(response_id):
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _view(self, request: Request) -> CallerResponses:
        return self.store.view(self.admission.caller(request.scope, headers_of(request.scope), "chat"))


def _not_found(response_id: str) -> ApiError:
    message = f"response '{printable(response_id)}' is not stored here"
    return ApiError(404, "response_not_found", message, "response_id")
