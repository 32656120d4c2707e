"""Models, versions and rollouts of the registry, and requests to change them under the name of a user."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from headrace_console.sources.calls import bearer, call
from headrace_console.users import User
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_schemas.http.catalog import WHO_HEADER
from headrace_schemas.http.registry_api import (
    ModelList,
    ModelState,
    RolloutList,
    RolloutState,
    VersionList,
    VersionState,
)
from headrace_schemas.values.base import Model

_CACHE_S = 1.0
_CACHED_MAX = 64
VERSIONS_MAX = 400
M = TypeVar("M", bound=Model)


class RegistryReader:
    """Client of the registry. It caches each response to a GET for a second."""

    def __init__(self, url: str, internal_key: str, clock: Clock) -> None:
        self._url = url
        self._headers = bearer(internal_key)
        self._clock = clock
        self._cache: dict[str, tuple[float, bytes]] = {}

    async def models(self) -> tuple[ModelState, ...]:
        """Return all models."""
        return (await self._get("/v1/models", ModelList)).data

    async def model(self, name: str) -> ModelState:
        """Return a model. Raises `Refused` 404."""
        return await self._get(f"/v1/models/{_segment(name)}", ModelState)

    async def versions(self, model: str) -> tuple[VersionState, ...]:
        """Return the newest 400 versions of a model, the newest first."""
        path = f"/v1/models/{_segment(model)}/versions?limit={VERSIONS_MAX}"
        return (await self._get(path, VersionList)).data

    async def rollouts(self, limit: int = 100) -> tuple[RolloutState, ...]:
        """Return the newest rollouts of all models, without charts."""
        return (await self._get(f"/v1/rollouts?limit={limit}", RolloutList)).data

    async def rollout(self, rollout_id: str) -> RolloutState:
        """Return a rollout with its chart and its decisions. Raises `Refused` 404."""
        return await self._get(f"/v1/rollouts/{_segment(rollout_id)}", RolloutState)

    async def change(self, path: str, body: Model, user: User) -> None:
        """Request a change. The registry's audit log records the name of the user.

        Raises:
            Refused: the registry refuses the change, with its reason, or it does not answer (503).
        """
        headers = {**self._headers, WHO_HEADER: user.name, "content-type": "application/json"}
        await call("registry", "POST", f"{self._url}{path}", headers, body.model_dump_json(exclude_none=True).encode())
        self._cache.clear()

    async def _get(self, path: str, model: type[M]) -> M:
        now_s = self._clock.monotonic_s()
        cached = self._cache.get(path)
        if cached is not None and now_s - cached[0] < _CACHE_S:
            content = cached[1]
        else:
            content = await call("registry", "GET", f"{self._url}{path}", self._headers)
            if len(self._cache) >= _CACHED_MAX:
                self._cache.clear()
            self._cache[path] = (now_s, content)
        try:
            return model.model_validate_json(content, extra="ignore")
        except ValidationError:
            raise Refused(
                502, "registry_answer", "The registry's answer cannot be read. Is it another release?"
            ) from None


def _segment(name: str) -> str:
    """Return a name as one segment of a path. Raises `Refused` 404 for a name that would change the path."""
    if name in ("", ".", ".."):
        raise Refused(404, "not_found", "There is nothing here for you. Check the address.")
    return quote(name, safe="@")
