"""Announcements of services, which are available without starting them: the entry points `headrace.services`.

    [project.entry-points."headrace.services"]
    echo = "headrace_echo.service:INFO"

The name is that of the service and of its section of the settings. The supervisor, `headrace config`, `status` and the
settings of all services find services, Headrace's own included, by these entry points.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_runtime.registries import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Description of a service, which its package registers as an entry point for the supervisor and the CLI.

    It is read without starting the service. So the module that contains it must not import other modules of the
    service.
    """

    module: str
    """Package of the service. `python -m MODULE` starts it, and the package's constant `SERVICE` is a
    `headrace_runtime.main.Service`."""
    summary: str
    """Description of the service in one sentence."""
    port: int = 0
    """Default of the HTTP port `<name>.port`; with 0 the system chooses one."""
    more_ports: tuple[str, ...] = ()
    """Names of the service's settings that contain further ports. `headrace up` does not assign these ports to other
    services."""
    needs_setting: str = ""
    """The dotted name of a setting that the service requires, such as `trainer.base`. `headrace up` does not start the
    service until it is set."""
    consumes: tuple[str, ...] = ()
    """Topics that the service reads."""
    produces: tuple[str, ...] = ()
    """Topics that the service writes, besides `dead-letters`."""
    database: bool = False
    """Whether the service has state in the database, with migrations in `<module>.migrations`."""
    gateway_setting: str = ""
    """Name of the service's setting whose default is the gateway's base URL."""
    is_bus: bool = False
    """Whether the service is the bus. It starts first, stops last, and does not start if `bus.address` names another
    bus. Its setting `kafka_port` is the port of the bus."""
    is_gateway: bool = False
    """Whether agents of users call the service. The supervisor keeps its listening socket open, so that no call is
    refused while the service restarts."""
    is_background: bool = False
    """Whether no call of an agent waits for the service. On one machine it then gets only processor time that the
    gateway and the replicas do not need."""


SERVICES: Registry[ServiceInfo] = Registry("services", ServiceInfo, "service")


def installed_services() -> dict[str, ServiceInfo]:
    """Return all installed services by name. Raises `PluginError` if an announcement is invalid."""
    return SERVICES.all()
