"""Settings of the services: one TOML file with a section per service, overridden by environment variables.

    data_dir = ".headrace"
    [bus]
    address = "127.0.0.1:9092"
    [gateway]
    port = 8000

`HEADRACE_GATEWAY__PORT=8100` overrides `gateway.port`. Only its own service reads a section, except for
`Common.section_of`. Every service checks the names of all sections, so that each service refuses an unknown section
such as `[gatway]`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)

from headrace_runtime import services
from headrace_runtime.errors import SettingError
from headrace_runtime.registries import PluginError
from headrace_runtime.settings import table as settings_table

SERVICES = ("broker", "gateway", "inference", "collector", "scorer", "judge", "trainer", "registry", "console")
"""Names of Headrace's own services. A container image has only one of them, but its settings file has all sections."""
Port = Annotated[int, Field(ge=0, le=65535)]
HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?)$")]
"""Name of a host without its port, an address without brackets, or `*.` and a domain. `*` matches any host."""
Origin = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\[\]:-]{1,255}$")]
"""Scheme, host and port of a web page."""


class Section(BaseModel):
    """Table of the settings file. `headrace config` prints the docstrings of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Names of the settings in this section that most users set. `headrace config init` writes them."""
    TIER: ClassVar[Literal["tuning", "limits"]] = "tuning"
    """Tier of the other settings, except those whose names denote limits (`headrace_runtime.settings.reference`)."""

    FIXED: ClassVar[Mapping[str, settings_table.Fixed]] = {}
    """Former settings with the value that is fixed now. A file may set this value still, and no other one."""
    PARAMETERS: ClassVar[tuple[str, ...]] = ()
    """Fields that are no settings but constants: nobody has a reason to change them. Tests pass other values to the
    constructor. A file may set one of them to its default, as in `FIXED`."""
    SHARED: ClassVar[tuple[str, ...]] = ()
    """Names of settings that the enclosing table has, too, and whose values there are the defaults here."""

    @classmethod
    def announced(cls) -> Mapping[str, type[Section]]:
        """Return the classes of the inner sections that installed packages add to this section, by name.

        A file may lack such an inner section, so all settings in it must have defaults.
        """
        return {}

    def of(self, name: str) -> Section:
        """Return the inner section `name` that a package adds, with its defaults if the file has none."""
        section = getattr(self, name, None)
        return section if isinstance(section, Section) else type(self).announced()[name]()

    @model_validator(mode="before")
    @classmethod
    def _inner_sections_keep_their_defaults(cls, table: Any) -> Any:
        """Merge inner tables into the defaults of their fields.

        A field `limits: Limits = Limits(burst=9)` keeps the 9 if a file sets another value of `[limits]`.
        """
        if not isinstance(table, Mapping):
            return table
        fields = cls.model_fields
        own = dict(table)
        for name, field in fields.items():
            value = table.get(name, {})
            if isinstance(value, Mapping) and (shared := _shared_values(field.annotation, table)):
                own[name] = {**shared, **value}
        return {name: _merge(fields[name].default, value) if name in fields else value for name, value in own.items()}


def _shared_values(section: object, enclosing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the enclosing table that apply to a section which does not set them itself."""
    names = section.SHARED if isinstance(section, type) and issubclass(section, Section) else ()
    return {name: enclosing[name] for name in names if name in enclosing}


def _merge(default: object, value: Any) -> Any:
    """Return the table `value`, with the settings of `default` added at every depth where `value` has none."""
    if not isinstance(default, Section) or not isinstance(value, Mapping):
        return value
    defaults = {name: getattr(default, name) for name in default.model_fields_set if name not in value}
    return defaults | {name: _merge(getattr(default, name, None), item) for name, item in value.items()}


M = TypeVar("M", bound=Section)


def complete(model: type[M]) -> type[M]:
    """Return `model` with additional fields for the inner sections that installed packages add, at every depth.

    Raises:
        PluginError: a package announces a name that the section already has.
    """
    inner: dict[str, type[Section]] = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            completed = complete(section)
            if completed is not section:
                inner[name] = completed
    for name, section in model.announced().items():
        if name in model.model_fields:
            raise PluginError(f"a package announces settings as {name!r}, which {model.__name__} has; uninstall it")
        inner[name] = section
    return cast(type[M], _with(model, tuple(inner.items()))) if inner else model


@cache
def _with(model: type[Section], inner: tuple[tuple[str, type[Section]], ...]) -> type[Section]:
    """Return a subclass of the section's class with the `inner` sections as additional fields.

    Equal arguments return the same class, so that settings can be compared.
    """
    fields: dict[str, Any] = {name: (section, _default_of(model, name, section)) for name, section in inner}
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)


def _default_of(model: type[Section], name: str, section: type[Section]) -> Section:
    """Return the default of the field `name` as a `section` with the values that the present default sets."""
    default = model.model_fields[name].default if name in model.model_fields else None
    set_fields = default.model_fields_set if isinstance(default, Section) else ()
    return section(**{field: getattr(default, field) for field in set_fields})


class BusSettings(Section):
    """Address, login and timeouts of the Kafka cluster."""

    COMMON: ClassVar = ("address", "replication")
    PARAMETERS: ClassVar = ("compression", "request_timeout_s")

    address: str = "127.0.0.1:9092"
    """Kafka bootstrap address of the embedded broker or of Apache Kafka: `host:port`, several separated by commas."""
    username: str = "headrace"
    """User name for the login at the bus."""
    password: SecretStr = SecretStr("")
    """Password for the login at the bus (SASL), which the embedded broker also requires. `headrace up` generates one
    for the broker that it starts. Empty for no login."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """SASL mechanism of the login. The embedded broker supports `PLAIN`."""
    tls: bool = False
    """Whether connections to the bus are encrypted. The embedded broker does not support TLS."""
    ca_file: str = ""
    """PEM file with the certificates that verify the bus; empty for those of the system."""
    replication: Annotated[int, Field(ge=1)] = 1
    """Replication factor of topics that Headrace creates."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Timeout of one request to the bus in seconds: longer than a broker takes to elect the leader of a partition."""
    compression: Literal["none", "gzip"] = "none"
    """Compression of record batches by producers. On one machine it costs more than it saves; elsewhere, topics have
    `compression.type`."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time that a service waits for the bus at its start, in seconds."""
    session_timeout_s: Annotated[float, Field(ge=6, le=1800)] = 10.0
    """Seconds without a heartbeat after which a member of a consumer group counts as dead and its partitions are
    reassigned. A killed service gets its partitions back only then. Brokers accept 6 to 1800 s by default."""


class DatabaseSettings(Section):
    """Database of the services' state."""

    COMMON: ClassVar = ("url",)
    PARAMETERS: ClassVar = ("pool_size",)

    url: SecretStr = SecretStr("sqlite")
    """`sqlite` for one file per service under `data_dir`, or `postgresql://user:password@host/database`."""
    pool_size: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of connections per service (PostgreSQL only): all services take half of PostgreSQL's default limit."""


class BlobSettings(Section):
    """Location of the blob store: files of versions, saved states, and events that are too large for the bus."""

    COMMON: ClassVar = ("url",)

    url: str = ""
    """An fsspec URL such as `s3://bucket/headrace`; empty for a folder under `data_dir`."""


class LogSettings(Section):
    """Level and format of the log on standard error."""

    COMMON: ClassVar = ("level", "format")

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for people."""


class SecuritySettings(Section):
    """Authentication between services, and trusted hosts and origins."""

    COMMON: ClassVar = ("internal_key",)

    internal_key: SecretStr = SecretStr("")
    """Bearer token between services and for their metrics. It is required if a service listens beyond loopback."""
    hosts: tuple[HostPattern, ...] = ()
    """Further names that services accept in the header `Host`, such as that of a proxy: a name, or `*.` and a domain.
    Addresses, `localhost` and the machine's name are always accepted. If the list is empty, services beyond loopback
    accept any name, because they require keys."""
    origins: tuple[Origin, ...] = ()
    """Origins whose web pages may call services from a browser, such as `https://chat.example.com`."""
    replica_hosts: tuple[HostPattern, ...] = ()
    """Hosts of replicas that are called although their heartbeat is not signed with `internal_key`: a name, an address,
    or `*.` and a domain. It is needed while replicas of an older release run."""


@dataclass(frozen=True, slots=True)
class RefusalBounds:
    """Limits on the refused records of a tenant. Beyond them its further refused records are held (stored for a retry).

    The limits are exceeded after `run_max` consecutive refused records (0 for no limit), or if more than `share_max` of
    the tenant's last `window` records were refused.
    """

    run_max: int = 100
    share_max: float = 0.5
    window: int = 500


class DeadLetterSettings(Section):
    """Limit of a tenant's dead letters. Beyond it, or when more than half of its last 500 records were refused, its
    refused records are held until a restart or `POST /resume`."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    run_max: Annotated[int, Field(ge=0)] = 100
    """Consecutive refused records of one tenant after which its further refused records are held; 0 for no limit. They
    are also held when more than half of its last 500 records were refused."""

    @property
    def bounds(self) -> RefusalBounds:
        """These limits in the form that stream processors use."""
        return RefusalBounds(self.run_max)


class Common(Section):
    """Settings that all services share.

    A service's own section may set `host`, `lease_s` and `retry_s` to another value.
    """

    COMMON: ClassVar = ("data_dir", "host")

    data_dir: Path = Path(".headrace")
    """Folder of all data on this machine: databases, blobs, logs, the gateway's spool. Only its owner can read it."""
    host: str = "127.0.0.1"
    """Address on which the services listen for HTTP. The section of a service may set another one."""
    lease_s: Annotated[float, Field(ge=1)] | None = None
    """Seconds after the death of a process until another one of its service takes over its work. None: 10 for registry
    and trainer, 15 for the scorer, 30 for the judge. The section of a service may set another value."""
    retry_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that judge, registry and trainer retry while bus, database or blob store is unavailable, before the
    process ends and is restarted. The section of a service may set another value."""
    disk_free_bytes_min: Annotated[int, Field(ge=4096)] | None = None
    """Bytes that must stay free on the disk of `data_dir`. With less, services are not ready, the embedded broker and
    services with SQLite accept no records, the trainer pauses before a save that would leave less, and replicas do not
    fetch such a version. Compacted topics and the gateway's spool continue down to half of it. All continue without a
    restart once there is space. None for the smaller of 1 GiB and 5 % of the disk."""
    services_elsewhere: tuple[str, ...] = ()
    """Services of other packages that are not installed here but have a section in this file, because each service runs
    on a machine or in a container of its own."""
    bus: BusSettings = BusSettings()
    database: DatabaseSettings = DatabaseSettings()
    blobs: BlobSettings = BlobSettings()
    logs: LogSettings = LogSettings()
    security: SecuritySettings = SecuritySettings()
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    _table: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about settings of the file that have no effect any more."""
        return tuple(self._notes)

    def section_of(self, service: str, model: type[M]) -> M:
        """Return the fields of `model` from the section of another service, with defaults for missing ones.

        Raises:
            SettingError: a value is invalid.
        """
        table = _shared_values(model, self._table) | (self._table.get(service) or {})
        fields = {name: value for name, value in table.items() if name in model.model_fields}
        return _validate(model, fields, f"{service}.", [])


class ServiceSettings(Section):
    """Settings in the section of every service."""

    SHARED: ClassVar[tuple[str, ...]] = ("host",)

    host: str = "127.0.0.1"
    """Address on which the service listens for HTTP."""
    port: Port = 0
    """Port of the address; with 0 the system chooses one."""


S = TypeVar("S", bound=ServiceSettings)


def load(service: str, model: type[S], path: Path | None, environ: Mapping[str, str] | None = None) -> tuple[Common, S]:
    """Load the common settings and those of `service` from a file and from environment variables.

    Args:
        service: the name of the service.
        model: the class of its section.
        path: the settings file, or None for the defaults.
        environ: environment variables that override the file, by default those of this process.

    Raises:
        SettingError: a name is unknown or a value is invalid.
        PluginError: the announcement of an installed package is invalid.
    """
    environ = os.environ if environ is None else environ
    table = settings_table.read(path, environ)
    notes: list[str] = []
    common = _validate(Common, {k: v for k, v in table.items() if k in Common.model_fields}, "", notes)
    names = (*Common.model_fields, *SERVICES, service, *common.services_elsewhere)
    for name, value in table.items():
        if name not in names and name not in (all_names := (*names, *services.SERVICES.names())):
            raise SettingError(name, value, f"unknown{settings_table.hint(name, all_names)}")
    common._table, common._notes = table, notes
    section = table.get(service, {})
    section = {**_shared_values(model, table), **section} if isinstance(section, Mapping) else section
    settings = _validate(complete(model), section, f"{service}.", notes)
    _check_bind(service, settings, common)
    return common, settings


def host_fits(host: str, pattern: str) -> bool:
    """Return whether `host` matches `pattern`: an equal name, `*`, or `*.` and a domain of the host."""
    host, pattern = host.lower().rstrip("."), pattern.lower()
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _validate(model: type[M], table: object, prefix: str, notes: list[str]) -> M:
    """Return the section of a table. Append to `notes` a sentence about each setting that has no effect any more."""
    table = settings_table.without_fixed(model, table, prefix, notes)
    settings_table.check_numbers(model, table, prefix)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt name is probably the reason for the other problems.
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        path = [str(part) for part in first["loc"]]
        remedy = first["msg"].removeprefix("Value error, ")
        if first["type"] == "string_type" and isinstance(first["input"], int | float):
            remedy += "; put it in quotes"
        if first["type"] == "extra_forbidden":
            section = settings_table.section_at(model, path[:-1])
            remedy = f"unknown{settings_table.hint(path[-1], list(section.model_fields) if section else [])}"
        raise SettingError(prefix + ".".join(path), first["input"], remedy) from None


def _check_bind(service: str, settings: ServiceSettings, common: Common) -> None:
    if not is_loopback(settings.host) and not common.security.internal_key.get_secret_value():
        raise SettingError(
            f"{service}.host", settings.host, "listens beyond this machine without a key; set security.internal_key"
        )
