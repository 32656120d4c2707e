"""A client for the registry's REST interface, for the command line and for programs that manage versions."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from headrace.errors import Unreachable
from headrace.retries import Retries, answered
from headrace_schemas.base import Model
from headrace_schemas.catalog import WHO_HEADER
from headrace_schemas.registry_api import (
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
from headrace_schemas.stack_access import key_for
from headrace_schemas.text import printable

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8020"
_PATH_SAFE = "/?&=:@,+%~"
M = TypeVar("M", bound=Model)


class ModelRegistry:
    """Models and versions. Methods raise `ApiError` when the registry refuses and `Unreachable` without an answer.

    Everything may be asked twice, so a request that found nobody is made again. Close it or use `with`.
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
        """The newest first, each with its decisions."""
        return self.ask("GET", f"/v1/models/{name}/versions?limit={limit}", VersionList).data

    def promote(self, name: str, version: str, *, force: bool = False) -> ModelState:
        """Ask for a version's promotion; the decision comes later. `force` skips the gate, never the probe."""
        return self._change(name, "promote", PromoteRequest(version=version, force=force))

    def roll_back(self, name: str, *, reason: str = "") -> ModelState:
        """Make the previous version champion again and withdraw the present one."""
        return self._change(name, "rollback", RollbackRequest(reason=reason))

    def withdraw(self, name: str, version: str, *, reason: str = "") -> ModelState:
        """Withdraw a version: it gets no more turns."""
        return self._change(name, "withdraw", WithdrawRequest(version=version, reason=reason))

    def pin(self, name: str, version: str | None = None, *, reason: str = "") -> ModelState:
        """Keep a version champion until it is unpinned: the present champion, or another one once it is probed."""
        return self._change(name, "pin", PinRequest(version=version, reason=reason))

    def unpin(self, name: str, *, reason: str = "") -> ModelState:
        """Let candidates take over again."""
        return self._change(name, "unpin", HoldRequest(reason=reason))

    def pause(self, name: str, *, reason: str = "") -> ModelState:
        """Let new versions wait after they are registered. Requests of operators are still carried out."""
        return self._change(name, "pause", HoldRequest(reason=reason))

    def resume(self, name: str, *, reason: str = "") -> ModelState:
        """Process the versions that waited."""
        return self._change(name, "resume", HoldRequest(reason=reason))

    def stop(self, name: str, *, reason: str = "") -> ModelState:
        """A pause, and whatever is on its way to champion serves nobody any more. `resume` lets new versions have their
        turn."""
        return self._change(name, "stop", HoldRequest(reason=reason))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _change(self, name: str, what: str, body: Model) -> ModelState:
        return self.ask("POST", f"/v1/models/{name}/{what}", ModelState, body)

    def ask(self, method: str, path: str, model: type[M], body: Model | None = None) -> M:
        """Any page of the interface; `headrace_schemas.catalog` and `registry_api` have what they take and answer."""
        content = body.model_dump_json().encode() if body else None
        safe = quote(path, safe=_PATH_SAFE)
        answer = answered(
            lambda: self._http.request(method, safe, content=content), self._retries, f"{self._url}{safe}"
        )
        try:
            return model.model_validate_json(answer.content, extra="ignore")
        except ValidationError as error:
            field = printable(".".join(str(part) for part in error.errors()[0]["loc"]))
            raise Unreachable(
                f"{self._url}{printable(path)} answered with something else than {model.__name__} (field {field!r}): "
                "the address may belong to another program, or to a Headrace of another version"
            ) from None
