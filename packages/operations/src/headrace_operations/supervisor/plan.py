"""Plan of a start: the services, their ports and their settings."""

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
from headrace_runtime.services import installed_services as announced

DEFAULT_DATA_DIR = Path(".headrace")
KAFKA_PORT = 9092
_UNPRIVILEGED_PORT_MIN = 1024
"""Lower ports are privileged."""
_AUTO_PORTS, _AUTO_PORT_TRIES = range(15_000, 32_000), 1000
"""Range and number of tries of `auto_ports`; outgoing connections use ports from 32768 (Linux) or 49152 on."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Plan of one process: `python -m module` with HTTP on `host:port`."""

    name: str
    info: ServiceInfo
    host: str
    port: int
    python: str = sys.executable
    """Interpreter of the process; a service may have its own environment."""

    @property
    def module(self) -> str:
        return self.info.module

    @property
    def keeps_socket(self) -> bool:
        """Whether the supervisor owns the listening socket, because users' agents connect to this service."""
        return self.info.is_gateway

    @property
    def url(self) -> str:
        return f"http://{_client_host(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The services that `headrace up` starts, with their settings.

    `left_out` maps other installed services to reasons.
    """

    data_dir: Path
    environ: Mapping[str, str]
    services: tuple[ServicePlan, ...]
    bus: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    token_is_key: bool = False
    """Whether the token of the stack is `security.internal_key`."""
    token_is_password: bool = False
    """Whether the token of the stack is the password of the bus."""


def installed() -> dict[str, ServiceInfo]:
    """Return every service of the entry point group `headrace.services` by name.

    Raises:
        UsageError: an announced service cannot be loaded.
    """
    try:
        return announced()
    except PluginError as error:
        raise UsageError(str(error)) from None


def data_dir_of(data_dir: Path | None, overrides: Overrides) -> Path:
    """Return the data directory as an absolute path: the argument, the setting `data_dir`, or the default."""
    return Path(data_dir or overrides.get("data_dir") or DEFAULT_DATA_DIR).absolute()


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
    """Build the plan of a start.

    Args:
        data_dir: the data directory; None takes the setting.
        overrides: the settings; ports, bus address and token are set in them.
        services: the installed services.
        only: names of the services to start; empty starts all.
        without: names of services not to start.
        auto_ports: choose a free port for each service whose port is not set.
        pythons: interpreter by service.
        token: value for the internal key and for the password of the embedded broker, unless they are set.

    Raises:
        UsageError: a service is not installed or a port is not available.
    """
    if not services:
        raise UsageError(
            "no Headrace service is installed in this environment; pip install 'headrace[local]' installs all of them, "
            "and pip install headrace those that need no torch"
        )
    interpreters = {name: _interpreter(name, path) for name, path in (pythons or {}).items()}
    for name in (*only, *without, *interpreters):
        if name not in services:
            raise UsageError(
                f"service {name!r} is not installed; the installed services are {', '.join(sorted(services))}"
            )
    folder = data_dir_of(data_dir, overrides)
    overrides.set("data_dir", folder)
    token_is_key = _set_default_token(token, "security.internal_key", overrides)
    left_out = {
        name: reason
        for name, info in services.items()
        if (reason := exclusion_reason(name, info, overrides, only, without))
    }
    chosen = {name: info for name, info in services.items() if name not in left_out}
    ports, token_is_password = _Ports(auto_ports), False
    for name in (name for name, info in chosen.items() if info.is_bus):
        kafka_port = ports.reserve(f"{name}.kafka_port", overrides, KAFKA_PORT)
        token_is_password = _set_default_token(token, "bus.password", overrides)
        overrides.set("bus.address", f"127.0.0.1:{kafka_port}")
    for setting in (f"{name}.{port}" for name, info in chosen.items() for port in info.more_ports):
        if overrides.get(setting):
            ports.reserve(setting, overrides, 0)
    plans = []
    for name, info in chosen.items():
        port = ports.reserve(f"{name}.port", overrides, info.port)
        host = str(overrides.get(f"{name}.host") or overrides.get("host") or "127.0.0.1")
        plans.append(ServicePlan(name, info, host, port, interpreters.get(name, sys.executable)))
    for gateway in (plan for plan in plans if plan.info.is_gateway):
        for setting in filter(None, (info.gateway_setting for info in chosen.values())):
            overrides.default(setting, f"{gateway.url}/v1")
    bus = str(overrides.get("bus.address") or f"127.0.0.1:{KAFKA_PORT}")
    return Plan(folder, overrides.environ, tuple(plans), bus, left_out, token_is_key, token_is_password)


def _set_default_token(token: str, setting: str, overrides: Overrides) -> bool:
    """Set `setting` to `token` unless it is set already, and return whether that was done."""
    if not token or overrides.get(setting):
        return False
    overrides.set(setting, token)
    return True


def parse_pythons(assignments: Collection[str]) -> dict[str, str]:
    """Parse `--python SERVICE=PATH` options.

    Raises:
        UsageError: an option has another form.
    """
    interpreters = {}
    for assignment in assignments:
        name, _, path = assignment.partition("=")
        if not (name and path):
            raise UsageError(
                f"--python {assignment}: the form is SERVICE=PATH, for example inference=.venv-vllm/bin/python"
            )
        interpreters[name] = path
    return interpreters


def _interpreter(service: str, path: str) -> str:
    """Return the absolute path of an interpreter. Links are not resolved, because a link selects the environment."""
    absolute = str(Path(path).expanduser().absolute())
    if not os.access(absolute, os.X_OK) or Path(absolute).is_dir():
        raise UsageError(
            f"--python {service}={path}: is not an executable file; name the interpreter of an environment"
        )
    return absolute


def exclusion_reason(
    name: str, info: ServiceInfo, overrides: Overrides, only: Collection[str] = (), without: Collection[str] = ()
) -> str | None:
    """Return the reason why `headrace up` does not start a service, or None if it starts the service."""
    if name in without:
        return "--without"
    if only:
        return None if name in only else "--only"
    if info.is_bus and overrides.get("bus.address"):
        return f"bus.address = {overrides.get('bus.address')}"
    setting = info.needs_setting
    return f"{setting} is not set" if setting and not overrides.get(setting) else None


class _Ports:
    """Assigns a different port to each service: the configured, the default or a free one."""

    def __init__(self, auto: bool) -> None:
        self._auto = auto
        self._reserved: set[int] = set()

    def reserve(self, setting: str, overrides: Overrides, default_port: int) -> int:
        """Choose the port of `setting`, write it into the settings and return it.

        Raises:
            UsageError: the port is not available.
        """
        configured = overrides.get(setting)
        preferred = configured if isinstance(configured, int) else default_port
        if preferred and not (self._auto and configured is None):
            self._check(preferred, setting)
            port = preferred
        else:
            port = self._find_free()
        self._reserved.add(port)
        overrides.set(setting, port)
        return port

    def _check(self, port: int, setting: str) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if port in self._reserved or error.errno in (errno.EADDRINUSE, errno.EACCES):
                    remedy = "" if self._auto else ", or let `headrace up --auto-ports` choose free ports"
                    other = port + 1 if port >= _UNPRIVILEGED_PORT_MIN else _UNPRIVILEGED_PORT_MIN + port
                    raise UsageError(
                        f"{setting} = {port}: {(error.strerror or str(error)).lower()}; set another port, for example "
                        f"--set {setting}={other}{remedy}"
                    ) from None
                raise
        if port in self._reserved:
            raise UsageError(f"{setting} = {port}: another service has this port; set another port")

    def _find_free(self) -> int:
        """Return a free port outside the range of outgoing connections, which could occupy it before the service
        starts."""
        for _ in range(_AUTO_PORT_TRIES):
            port = random.choice(_AUTO_PORTS)
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in self._reserved:
                    return port
        raise UsageError(f"no port between {_AUTO_PORTS.start} and {_AUTO_PORTS.stop} is free; set the ports")


def _client_host(host: str) -> str:
    """Return the host with which clients on this machine call a service that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 (compared, not bound)
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
