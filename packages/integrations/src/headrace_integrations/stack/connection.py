"""`Stack`: the addresses of one Headrace, and the requests that programs send to it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from headrace.async_client import AsyncClient
from headrace.client import Client
from headrace.errors import ApiError, Retries, UsageError, send_with_retries
from headrace_operations.arguments import model_name
from headrace_schemas.http.catalog import ServeRequest
from headrace_schemas.http.registry_api import ModelState
from headrace_schemas.http.stack_access import key_for

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas import Trajectory

ENTERED: ContextVar[Stack | None] = ContextVar("headrace_stack", default=None)
"""The innermost stack whose `with` statement is active."""
_DECIDED = ("promoted", "rejected", "withdrawn", "skipped", "held")
_POLL_S = 0.2
_SUPPORT = "headrace.support"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the services. The defaults are those of `headrace up` on this machine."""

    gateway: str = "http://127.0.0.1:8000"
    bus: str = "127.0.0.1:9092"
    registry: str = "http://127.0.0.1:8020"
    trainer: str = "http://127.0.0.1:8034"


class Services(Protocol):
    """Handle of a private Headrace, by which its processes are stopped.

    `headrace_operations.private_stack` creates it.
    """

    data_dir: Path

    def stop(self) -> None: ...


class Stack:
    """Addresses and clients of one Headrace, with the name of its trained model.

    The caller must close it, or use it in a `with` statement. A private stack stops with its `with` statement or at the
    end of the program, and its data is removed. Methods raise the exceptions of `headrace.Client` and `ModelRegistry`.
    """

    tenant = "default"

    def __init__(
        self,
        addresses: Addresses,
        model: str,
        *,
        services: Services | None = None,
        data_dir: Path | None = None,
        api_key: str | None = None,
        internal_key: str | None = None,
    ) -> None:
        self.addresses = addresses
        self.model = model
        self.base_url = f"{addresses.gateway}/v1"
        """URL for `OpenAI(base_url=...)`."""
        self.bus = addresses.bus
        self.api_key = api_key
        self._internal_key = internal_key
        self.data_dir = services.data_dir if services else data_dir
        """Data directory of the stack, if it is known and on this machine."""
        self.is_private = services is not None
        self._stop = weakref.finalize(self, services.stop) if services else None
        self._entered: list[Token[Stack | None]] = []

    @cached_property
    def client(self) -> Client:
        return Client(self.addresses.gateway, api_key=self.api_key)

    @cached_property
    def registry(self) -> ModelRegistry:
        from headrace.registry import ModelRegistry

        return ModelRegistry(self.addresses.registry, key=self._internal_key)

    def async_client(self) -> AsyncClient:
        """Open an asynchronous client. The caller must close it."""
        return AsyncClient(self.addresses.gateway, api_key=self.api_key)

    def openai(self, headers: Mapping[str, str], *, blocking: bool = False) -> Any:
        """Return an OpenAI client whose calls carry the `headers` of a session.

        The client is an `openai.AsyncOpenAI` or, if `blocking`, an `openai.OpenAI`.
        """
        try:
            openai = import_module("openai")
        except ImportError:
            raise UsageError("this needs the package openai: pip install openai") from None
        kind = openai.OpenAI if blocking else openai.AsyncOpenAI
        http = openai.DefaultHttpxClient if blocking else openai.DefaultAsyncHttpxClient
        return kind(
            base_url=self.base_url,
            api_key=self.api_key or "-",
            default_headers=dict(headers),
            http_client=http(trust_env=False),  # proxies from the environment do not apply to Headrace's own address
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the trainer by dotted name. Secrets are hidden."""
        page = self._page(f"{self.addresses.trainer}/settings", self._internal_key or key_for(self.addresses.trainer))
        return flatten_settings(page["settings"], "trainer.")

    def check(self, base: str | Path | None, model: str | None, settings: Mapping[str, object]) -> None:
        """Check that the running Headrace has this base, this model and these settings, so that none is silently
        ignored.

        Raises:
            UsageError: a value differs; the message names the first difference.
        """
        requested: dict[str, object] = {"trainer.base": str(base)} if base else {}
        requested |= {**({"trainer.model": model} if model else {}), **settings}
        actual = self.settings() if requested else {}
        for name, value in requested.items():
            if name not in actual:
                problem = (
                    "no such setting" if name.startswith("trainer.") else "only settings of the trainer can be compared"
                )
                raise UsageError(
                    f"{name} = {value!r}: {problem}; set it where Headrace is started, and leave it out here"
                )
            if not _has_value(name, value, actual):
                raise UsageError(
                    f"{name} = {value!r}: the running trainer has {actual[name]!r}; start it with this setting, or "
                    "leave the setting out here"
                )

    def serving(self, name: str | None = None) -> str | None:
        """Return the version that the gateway serves under a model name or alias, or None if it serves none.

        The default name is that of the stack's model.
        """
        try:
            page = self._page(f"{self.base_url}/models/{name or self.model}", self.api_key)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        version: str | None = page["version"]
        return version

    def decision(self, version: str) -> str | None:
        """Return the registry's decision about a version, or None until the gateway applies a decision.

        The result is `waits` if the model is paused or pinned, because the registry then makes no decision.
        """
        model = self.registry.model(self.model)
        versions = self.registry.versions(self.model, limit=200)
        state = next((entry.state for entry in versions if entry.id == version), None)
        if state in _DECIDED:
            return state if state != "promoted" or self.serving() == model.champion else None
        return "waits" if state == "registered" and (model.paused or model.pinned) else None

    async def until_decided(self, version: str, timeout_s: float) -> str:
        """Wait until clients are affected by a decision about a version, and return the decision.

        Raises `UsageError` after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (decision := await asyncio.to_thread(self.decision, version)) is None:
            if loop.time() > deadline:
                raise UsageError(f"{version} has no decision after {timeout_s:g} s; see `headrace models show`")
            await asyncio.sleep(_POLL_S)
        return decision

    async def until_serving(self, version: str, timeout_s: float) -> None:
        """Wait until calls of the model's name are answered by this version. Raises `UsageError` after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while await asyncio.to_thread(self.serving) != version:
            if loop.time() > deadline:
                raise UsageError(
                    f"{version} is not the served version after {timeout_s:g} s; see `headrace models show`"
                )
            await asyncio.sleep(_POLL_S)

    async def hold(self, version: str, timeout_s: float = 120.0) -> None:
        """Request that replicas keep a version loaded, and wait until the gateway serves it."""
        if await asyncio.to_thread(self.serving, version) is None:
            model, body = version.partition("@")[0], ServeRequest(version=version, why="asked for by a program")
            path = f"/v1/models/{model}/serve"
            await asyncio.to_thread(self.registry.ask, "POST", path, ModelState, body)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while await asyncio.to_thread(self.serving, version) is None:
            if loop.time() > deadline:
                raise UsageError(f"{version} is not loaded after {timeout_s:g} s; see `headrace models show`")
            await asyncio.sleep(_POLL_S)

    def trajectory(self, session_id: str, *, timeout_s: float = 30.0) -> Trajectory:
        """Return the newest trajectory of an ended session."""
        return self.client.trajectory(session_id, bus=self.bus, timeout_s=timeout_s)

    def export(self, version: str, folder: str | Path, *, merge: bool = False) -> Path:
        """Write the files of a version to a folder that transformers, PEFT and vLLM can load.

        The files of the version must be on this machine.
        """
        from headrace_operations import private_stack

        private_stack.export(self.registry, version, Path(folder), merge, self.data_dir)
        return Path(folder)

    def stop(self) -> None:
        """Stop a private stack. A Headrace that was running before `attach` is not stopped."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> Self:
        self._entered.append(ENTERED.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        ENTERED.reset(self._entered.pop())
        self.stop()

    def _page(self, url: str, key: str | None) -> Any:
        import httpx2

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return send_with_retries(
            lambda: httpx2.get(url, headers=headers, timeout=30.0, trust_env=False), Retries(attempts=3), url
        ).json()


def support(name: str, distribution: str) -> Any:
    """Return the object that an installed service registers as `name` in the entry-point group `headrace.support`.

    Args:
        name: name of the entry point, for example `judge`.
        distribution: the distribution that registers it.

    Raises:
        UsageError: no installed distribution registers `name`; the message names the distribution to install.
    """
    for point in entry_points(group=_SUPPORT, name=name):
        return point.load()
    raise UsageError(f"this needs the package {distribution}: pip install {distribution}")


def flatten_settings(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values in nested tables by the dotted names of the settings.

    A setting whose value is a mapping is returned both as a whole and by its entries.
    """
    settings: dict[str, Any] = {}
    for name, value in table.items():
        settings[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            settings |= flatten_settings(value, f"{prefix}{name}.")
    return settings


def _has_value(name: str, requested: object, actual: Mapping[str, Any]) -> bool:
    """Return whether a setting of the running trainer has the requested value.

    `requested` may also name a base by the model's name, because a program may not know the folder on the trainer's
    machine.
    """
    value = actual[name]
    if name == "trainer.base" and isinstance(requested, str):
        return Path(requested).absolute() == Path(value).absolute() or model_name(requested) == str(
            actual["trainer.model"]
        )
    return bool((list(requested) if isinstance(requested, tuple) else requested) == value)
