"""What is to be started: which services, on which ports, with which settings."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import UsageError
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.registries import PluginError
from headrace_runtime.services import ServiceInfo
from headrace_runtime.services import installed as announced

DEFAULT_DATA_DIR = Path(".headrace")
KAFKA_PORT = 9092
_USERS_PORT = 1024
"""Lower ones belong to the system."""
_FREE, _FREE_TRIES = range(15_000, 32_000), 1000
"""Where `auto_ports` looks; outgoing connections have ports from 32768 on (Linux) or 49152 on."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process: `python -m module`, its HTTP on `host:port`."""

    name: str
    info: ServiceInfo
    host: str
    port: int
    python: str = sys.executable
    """The interpreter that runs it: a service may live in an environment of its own."""

    @property
    def module(self) -> str:
        return self.info.module

    @property
    def held(self) -> bool:
        """Whether the supervisor holds its listening socket: users' agents call this one."""
        return self.info.is_gateway

    @property
    def url(self) -> str:
        return f"http://{_reachable(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `up` starts. `left_out` says why the other installed services are not."""

    data_dir: Path
    environ: Mapping[str, str]
    services: tuple[ServicePlan, ...]
    bus: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    token_is_key: bool = False
    """The stack's token is `security.internal_key`."""
    token_is_password: bool = False
    """The stack's token is the password of the bus."""


def installed() -> dict[str, ServiceInfo]:
    """Every service that announces itself under the entry point group `headrace.services`, by name. Raises `UsageError`
    for one that cannot be used."""
    try:
        return announced()
    except PluginError as error:
        raise UsageError(str(error)) from None


def data_dir_of(given: Path | None, overrides: Overrides) -> Path:
    return Path(given or overrides.get("data_dir") or DEFAULT_DATA_DIR).absolute()


def make(
    data_dir: Path | None,
    overrides: Overrides,
    services: Mapping[str, ServiceInfo],
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
    auto_ports: bool = False,
    pythons: Mapping[str, str] | None = None,
    token: str = "",
) -> Plan:
    """Decide. `token` becomes the internal key and the password of the embedded broker where no other is set.

    Raises `UsageError` for names that are not installed and ports that are taken.
    """
    if not services:
        raise UsageError(
            "no service of Headrace is installed in this environment, so that there is nothing to start; install "
            "headrace-gateway, headrace-collector, headrace-scorer, headrace-trainer, headrace-registry, "
            "headrace-inference and headrace-broker"
        )
    found = {name: _interpreter(name, path) for name, path in (pythons or {}).items()}
    for name in (*only, *without, *found):
        if name not in services:
            raise UsageError(f"no service {name!r} is installed; there are {', '.join(sorted(services))}")
    folder = data_dir_of(data_dir, overrides)
    overrides.set("data_dir", folder)
    token_is_key = _use(token, "security.internal_key", overrides)
    left_out = {
        name: reason for name, info in services.items() if (reason := why_not(name, info, overrides, only, without))
    }
    chosen = {name: info for name, info in services.items() if name not in left_out}
    ports, token_is_password = _Ports(auto_ports), False
    for name in (name for name, info in chosen.items() if info.is_bus):
        kafka_port = ports.take(f"{name}.kafka_port", overrides, KAFKA_PORT)
        token_is_password = _use(token, "bus.password", overrides)
        overrides.set("bus.address", f"127.0.0.1:{kafka_port}")
    for setting in (f"{name}.{one}" for name, info in chosen.items() for one in info.more_ports):
        if overrides.get(setting):
            ports.take(setting, overrides, 0)
    plans = []
    for name, info in chosen.items():
        port = ports.take(f"{name}.port", overrides, info.port)
        host = str(overrides.get(f"{name}.host") or "127.0.0.1")
        plans.append(ServicePlan(name, info, host, port, found.get(name, sys.executable)))
    for gateway in (plan for plan in plans if plan.info.is_gateway):
        for setting in filter(None, (info.gateway_setting for info in chosen.values())):
            overrides.default(setting, f"{gateway.url}/v1")
    bus = str(overrides.get("bus.address") or f"127.0.0.1:{KAFKA_PORT}")
    return Plan(folder, overrides.environ, tuple(plans), bus, left_out, token_is_key, token_is_password)


def _use(token: str, setting: str, overrides: Overrides) -> bool:
    """Return whether `token` becomes a setting that nobody has set."""
    if not token or overrides.get(setting):
        return False
    overrides.set(setting, token)
    return True


def parse_pythons(given: Collection[str]) -> dict[str, str]:
    """Of `SERVICE=PATH`. Raises `UsageError`."""
    found = {}
    for one in given:
        name, _, path = one.partition("=")
        if not (name and path):
            raise UsageError(f"--python {one}: write it as SERVICE=PATH, such as inference=.venv-vllm/bin/python")
        found[name] = path
    return found


def _interpreter(service: str, path: str) -> str:
    """As an absolute path, not resolved: a link is what makes it that of an environment."""
    whole = str(Path(path).expanduser().absolute())
    if not os.access(whole, os.X_OK) or Path(whole).is_dir():
        raise UsageError(f"--python {service}={path}: there is no interpreter; name the one of an environment")
    return whole


def why_not(
    name: str, info: ServiceInfo, overrides: Overrides, only: Collection[str] = (), without: Collection[str] = ()
) -> str | None:
    """The reason why `up` leaves a service out, None when it starts it."""
    if name in without:
        return "--without"
    if only:
        return None if name in only else "--only"
    if info.is_bus and overrides.get("bus.address"):
        return f"bus.address is {overrides.get('bus.address')}"
    needed = info.needs_setting
    return f"{needed} is not set" if needed and not overrides.get(needed) else None


class _Ports:
    """Gives each service a port of its own: the configured one, its usual one, or a free one."""

    def __init__(self, auto: bool) -> None:
        self._auto = auto
        self._taken: set[int] = set()

    def take(self, setting: str, overrides: Overrides, usual: int) -> int:
        configured = overrides.get(setting)
        wanted = configured if isinstance(configured, int) else usual
        if wanted and not (self._auto and configured is None):
            self._check(wanted, setting)
            port = wanted
        else:
            port = self._free()
        self._taken.add(port)
        overrides.set(setting, port)
        return port

    def _check(self, port: int, setting: str) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if port in self._taken or error.errno in (errno.EADDRINUSE, errno.EACCES):
                    others = "" if self._auto else ", or have `headrace up --auto-ports` choose free ones"
                    raise UsageError(
                        f"{setting} = {port}: {(error.strerror or str(error)).lower()}; set another port, for example "
                        f"--set {setting}={port + 1 if port >= _USERS_PORT else _USERS_PORT + port}{others}"
                    ) from None
                raise
        if port in self._taken:
            raise UsageError(f"{setting} = {port}: another service has this port; set another one")

    def _free(self) -> int:
        """None of those that outgoing connections get: it could be gone before the service starts."""
        for _ in range(_FREE_TRIES):
            port = random.choice(_FREE)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in self._taken:
                    return port
        raise UsageError(f"no free port between {_FREE.start} and {_FREE.stop}; set the ports")


def _reachable(host: str) -> str:
    """Where to call a service that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 (compared, not bound)
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
