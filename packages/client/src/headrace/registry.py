"""Client of the registry's REST interface, for the command line and for programs that manage versions."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from headrace.errors import Retries, Unreachable, send_with_retries
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.http.registry_api import (
    HoldRequest,
    ModelList,
    ModelState,
    PinRequest,
    PromoteRequest,
    RollbackRequest,
    VersionList,
    VersionState,
    WithdrawRequest,
)
from headrace_schemas.http.stack_access import key_for
from headrace_schemas.values.base import Model
from headrace_schemas.values.text import printable

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8020"
_PATH_SAFE = "/?&=:@,+%~"
M = TypeVar("M", bound=Model)


class ModelRegistry:
    """Client of a registry for models and versions.

    Methods raise `ApiError` if the registry refuses the request and `Unreachable` if it does not answer. All requests
    are idempotent, so the client repeats requests that got no response. The caller must close the client, or use it in
    a `with` statement.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        who: str = "",
        timeout_s: float = 30.0,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        import httpx2

        self._url = url.rstrip("/")
        self._retries = retries or Retries(attempts=3)
        key = key or key_for(url)
        headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
        headers |= {b"content-type": b"application/json"}
        headers |= {WHO_HEADER.encode(): who.encode("utf-8", "surrogateescape")} if who else {}
        self._http = httpx2.Client(
            base_url=self._url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def models(self) -> tuple[ModelState, ...]:
        return self.ask("GET", "/v1/models", ModelList).data

    def model(self, name: str) -> ModelState:
        return self.ask("GET", f"/v1/models/{name}", ModelState)

    def versions(self, name: str, *, limit: int = 100) -> tuple[VersionState, ...]:
        """Return the versions of a model with their decisions, newest first."""
        return self.ask("GET", f"/v1/models/{name}/versions?limit={limit}", VersionList).data

    def promote(self, name: str, version: str, *, force: bool = False) -> ModelState:
        """Request the promotion of a version. The registry decides about it later. With `force` the version skips the
        gate, but not the probe."""
        return self._change(name, "promote", PromoteRequest(version=version, force=force))

    def roll_back(self, name: str, *, reason: str = "") -> ModelState:
        """Make the previous version the champion again, and withdraw the present champion."""
        return self._change(name, "rollback", RollbackRequest(reason=reason))

    def withdraw(self, name: str, version: str, *, reason: str = "") -> ModelState:
        """Withdraw a version, so that it gets no more turns."""
        return self._change(name, "withdraw", WithdrawRequest(version=version, reason=reason))

    def pin(self, name: str, version: str | None = None, *, reason: str = "") -> ModelState:
        """Pin the model until `unpin`: its present champion, or `version` once replicas have probed it, stays the
        champion."""
        return self._change(name, "pin", PinRequest(version=version, reason=reason))

    def unpin(self, name: str, *, reason: str = "") -> ModelState:
        """Allow candidates to replace the champion again."""
        return self._change(name, "unpin", HoldRequest(reason=reason))

    def pause(self, name: str, *, reason: str = "") -> ModelState:
        """Pause the model: new versions wait after their registration. Requests of operators are still carried out."""
        return self._change(name, "pause", HoldRequest(reason=reason))

    def resume(self, name: str, *, reason: str = "") -> ModelState:
        """End a pause, so that the waiting versions become candidates."""
        return self._change(name, "resume", HoldRequest(reason=reason))

    def stop(self, name: str, *, reason: str = "") -> ModelState:
        """Pause the model and remove all candidates from traffic. `resume` lets the registry process new versions
        again."""
        return self._change(name, "stop", HoldRequest(reason=reason))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _change(self, name: str, action: str, body: Model) -> ModelState:
        return self.ask("POST", f"/v1/models/{name}/{action}", ModelState, body)

    def ask(self, method: str, path: str, model: type[M], body: Model | None = None) -> M:
        """Send a request to the path `path` of the registry's REST interface. Return the response parsed as `model`.

        `headrace_schemas.http.catalog` and `headrace_schemas.http.registry_api` define the bodies of requests and
        responses.
        """
        content = body.model_dump_json().encode() if body else None
        safe = quote(path, safe=_PATH_SAFE)
        response = send_with_retries(
            lambda: self._http.request(method, safe, content=content), self._retries, f"{self._url}{safe}"
        )
        try:
            return model.model_validate_json(response.content, extra="ignore")
        except ValidationError as error:
            field = printable(".".join(str(part) for part in error.errors()[0]["loc"]))
            raise Unreachable(
                f"{self._url}{printable(path)} sent a response that is not a {model.__name__} (field {field!r}): "
                "check that the address is the registry's and that both sides have the same Headrace version"
            ) from None
