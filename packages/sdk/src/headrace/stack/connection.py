"""`Stack`: where the parts of one Headrace are, and what programs ask of them."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from headrace.async_client import AsyncClient
from headrace.client import Client
from headrace.errors import ApiError, UsageError
from headrace.retries import Retries, answered
from headrace_schemas.catalog import ServeRequest
from headrace_schemas.registry_api import ModelState
from headrace_schemas.stack_access import key_for

if TYPE_CHECKING:
    from headrace.registry import ModelRegistry
    from headrace_schemas import Trajectory

ENTERED: ContextVar[Stack | None] = ContextVar("headrace_stack", default=None)
"""The innermost stack whose `with` the program is in."""
_DECIDED = ("promoted", "rejected", "withdrawn", "skipped", "held")
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts are; what is not said is where `headrace up` puts it on this machine."""

    gateway: str = "http://127.0.0.1:8000"
    bus: str = "127.0.0.1:9092"
    registry: str = "http://127.0.0.1:8020"
    trainer: str = "http://127.0.0.1:8034"


class Services(Protocol):
    """The processes of a private Headrace (`headrace_cli.private_stack`)."""

    data_dir: Path

    def stop(self) -> None: ...


class Stack:
    """One Headrace. `model` is the name that its trained model is called by. Close it, or use `with`.

    A private one stops with its `with`, or when the program ends, and its data goes with it. Methods raise as
    `headrace.Client` and `ModelRegistry` do.
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
        """For `OpenAI(base_url=...)`."""
        self.bus = addresses.bus
        self.api_key = api_key
        self._internal_key = internal_key
        self.data_dir = services.data_dir if services else data_dir
        """Where its files are, when they are on this machine and known."""
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
        """A new one; whoever asks closes it."""
        return AsyncClient(self.addresses.gateway, api_key=self.api_key)

    def openai(self, headers: Mapping[str, str], *, blocking: bool = False) -> Any:
        """An `openai.AsyncOpenAI` (`blocking`: an `OpenAI`) whose calls carry these headers: those of a session."""
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
            http_client=http(trust_env=False),  # a proxy of the environment is not for a Headrace's own address
        )

    def settings(self) -> dict[str, Any]:
        """What the trainer is set to, by dotted name; secrets are hidden."""
        found = self._page(f"{self.addresses.trainer}/settings", self._internal_key or key_for(self.addresses.trainer))
        return flat(found["settings"], "trainer.")

    def check(self, base: str | Path | None, model: str | None, settings: Mapping[str, object]) -> None:
        """Raises `UsageError` for the first of these that is not so in this Headrace: nothing is silently ignored."""
        wanted: dict[str, object] = {"trainer.base": str(base)} if base else {}
        wanted |= {**({"trainer.model": model} if model else {}), **settings}
        known = self.settings() if wanted else {}
        for name, value in wanted.items():
            if name not in known:
                why = "no such setting" if name.startswith("trainer.") else "only the trainer tells its settings"
                raise UsageError(f"{name} = {value!r}: {why}; set it where Headrace was started, and leave it out here")
            if not _same(name, value, known):
                raise UsageError(
                    f"{name} = {value!r}, and the running trainer has {known[name]!r}; start it with this setting, or "
                    "leave the setting out here"
                )

    def serving(self, name: str | None = None) -> str | None:
        """The version that the gateway means now by the model's name, or by another one; None: it has none."""
        try:
            found = self._page(f"{self.base_url}/models/{name or self.model}", self.api_key)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        version: str | None = found["version"]
        return version

    def decision(self, version: str) -> str | None:
        """What the registry decided about a version, once that is in force at the gateway; None while it is not. A
        model that is paused or pinned decides nothing: `waits`."""
        model = self.registry.model(self.model)
        found = next((one.state for one in self.registry.versions(self.model, limit=200) if one.id == version), None)
        if found in _DECIDED:
            return found if found != "promoted" or self.serving() == model.champion else None
        return "waits" if found == "registered" and (model.paused or model.pinned) else None

    async def until_decided(self, version: str, timeout_s: float) -> str:
        """Returns the decision when clients see it. Raises `UsageError` when that takes longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (found := await asyncio.to_thread(self.decision, version)) is None:
            if loop.time() > deadline:
                raise UsageError(f"{version} is not decided after {timeout_s:g} s; `headrace models show` says why")
            await asyncio.sleep(_POLL_S)
        return found

    async def until_serving(self, version: str, timeout_s: float) -> None:
        """Returns when clients get this version by the model's name. Raises `UsageError` when that takes longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while await asyncio.to_thread(self.serving) != version:
            if loop.time() > deadline:
                raise UsageError(f"{version} does not serve after {timeout_s:g} s; `headrace models show` says why")
            await asyncio.sleep(_POLL_S)

    async def hold(self, version: str, timeout_s: float = 120.0) -> None:
        """Have replicas keep a version ready, and return when the gateway knows it."""
        if await asyncio.to_thread(self.serving, version) is None:
            model, body = version.partition("@")[0], ServeRequest(version=version, why="asked for by a program")
            path = f"/v1/models/{model}/serve"
            await asyncio.to_thread(self.registry.ask, "POST", path, ModelState, body)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while await asyncio.to_thread(self.serving, version) is None:
            if loop.time() > deadline:
                raise UsageError(f"{version} is not served after {timeout_s:g} s; `headrace models show` says why")
            await asyncio.sleep(_POLL_S)

    def trajectory(self, session_id: str, *, timeout_s: float = 30.0) -> Trajectory:
        """The newest trajectory of a session that has ended."""
        return self.client.trajectory(session_id, bus=self.bus, timeout_s=timeout_s)

    def export(self, version: str, folder: str | Path, *, merge: bool = False) -> Path:
        """Write a version as a folder that transformers, PEFT and vLLM load. On the machine that holds its files."""
        writer = support("headrace_cli.private_stack", "headrace-cli")
        writer.export(self.registry, version, Path(folder), merge, self.data_dir)
        return Path(folder)

    def stop(self) -> None:
        """Stop what was started here; a Headrace that ran before goes on."""
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
        return answered(
            lambda: httpx2.get(url, headers=headers, timeout=30.0, trust_env=False), Retries(attempts=3), url
        ).json()


def support(module: str, distribution: str) -> Any:
    """A module of a package that only some programs need. Raises `UsageError` that names the package to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(f"this needs the package {distribution}: pip install {distribution}") from None


def flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A table of tables by dotted names. A mapping that is a setting's value is found whole, and by its parts."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
    return found


def model_name(path: str | Path) -> str:
    """What a model folder or a path such as `Qwen/Qwen3-0.6B` is called here: names of models have no slash."""
    last = str(path).rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-_") or "model"


def _same(name: str, wanted: object, known: Mapping[str, Any]) -> bool:
    """A base may also be named as the model is: who attaches need not know where the folder lies."""
    there = known[name]
    if name == "trainer.base" and isinstance(wanted, str):
        return Path(wanted).absolute() == Path(there).absolute() or model_name(wanted) == str(known["trainer.model"])
    return bool((list(wanted) if isinstance(wanted, tuple) else wanted) == there)
