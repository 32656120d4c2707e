"""What is known of a service before it is started: the entry points `headrace.services`.

    [project.entry-points."headrace.services"]
    echo = "headrace_echo.service:INFO"

The name is that of the service and of its section of the settings. The supervisor, `headrace config`, `status` and the
settings of all services learn of it from here; ours have no other way.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_runtime.registries import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """An announcement. Its module imports nothing else of the service."""

    module: str
    """The package: `python -m module` starts the service, and has a `headrace_runtime.main.Service` as `SERVICE`."""
    summary: str
    """One sentence."""
    port: int = 0
    """Of its HTTP, where nobody sets `<name>.port`; 0 lets the system choose."""
    more_ports: tuple[str, ...] = ()
    """Settings of its own that are further ports where somebody sets them. `headrace up` keeps others from those."""
    needs_setting: str = ""
    """The dotted name of a setting without which there is nothing to start, such as `trainer.base`. `headrace up`
    leaves the service out until it is set."""
    consumes: tuple[str, ...] = ()
    """Topics that it reads."""
    produces: tuple[str, ...] = ()
    """Topics that it writes, besides `dead-letters`."""
    database: bool = False
    """It keeps state in the database, with migrations in `<module>.migrations`."""
    gateway_setting: str = ""
    """A setting of its own that takes the gateway's base URL where nobody sets it."""
    is_bus: bool = False
    """It is the bus: it starts first and stops last, and stays away where `bus.address` names another. Its setting
    `kafka_port` is where it listens."""
    is_gateway: bool = False
    """Users' agents call it: the supervisor holds its listening socket, and no call is refused while it restarts."""


SERVICES: Registry[ServiceInfo] = Registry("services", ServiceInfo, "service")


def installed() -> dict[str, ServiceInfo]:
    """Every installed service by name. Raises `PluginError` for one that cannot be used."""
    return SERVICES.all()
