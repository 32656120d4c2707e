"""Settings: one TOML file with a section per service, overridden by the environment. Unknown names stop the start.

    data_dir = ".headrace"
    [bus]
    address = "127.0.0.1:9092"
    [gateway]
    port = 8000

`HEADRACE_GATEWAY__PORT=8100` overrides `gateway.port`. A section is read by its service alone, but for
`Common.part_of`; every service checks the names of all sections, so that `[gatway]` is caught wherever the file is
used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import unquote, urlsplit

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

from headrace_runtime import services, settings_table
from headrace_runtime.errors import SettingError
from headrace_runtime.refusal_limit import RefusalBounds
from headrace_runtime.registries import PluginError
from headrace_schemas.text import closest

SERVICES = ("broker", "gateway", "inference", "collector", "scorer", "judge", "trainer", "registry")
"""Ours. An image holds one of them, and reads a file with the sections of all."""
Port = Annotated[int, Field(ge=0, le=65535)]
HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?)$")]
"""Name of a host without its port, an address without brackets, or `*.` and a domain; `*` is any host."""
Origin = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\[\]:-]{1,255}$")]
"""Scheme, host and port of a web page."""


class Section(BaseModel):
    """One table of the settings file. Field docstrings are the reference that `headrace config` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Names in this section that a user of Headrace sets (`headrace config init` writes them)."""
    TIER: ClassVar[Literal["tuning", "limits"]] = "tuning"
    """What the others are, but for those that are called bounds (`headrace_runtime.reference`)."""

    @classmethod
    def announced(cls) -> Mapping[str, type[Section]]:
        """Inner sections that installed packages bring, by name; see `complete`. All their settings have defaults."""
        return {}

    def of(self, name: str) -> Section:
        """The section of what is announced as `name`, with its defaults where nobody has set any."""
        found = getattr(self, name, None)
        return found if isinstance(found, Section) else type(self).announced()[name]()

    @model_validator(mode="before")
    @classmethod
    def _inner_sections_keep_their_defaults(cls, table: Any) -> Any:
        """A field `limits: Limits = Limits(burst=9)` keeps the 9 when a file sets another value of `[limits]`."""
        if not isinstance(table, Mapping):
            return table
        fields = cls.model_fields
        return {name: _over(fields[name].default, value) if name in fields else value for name, value in table.items()}


def _over(default: object, given: Any) -> Any:
    """`given` with what the section `default` sets and `given` does not, at every depth."""
    if not isinstance(default, Section) or not isinstance(given, Mapping):
        return given
    kept = {name: getattr(default, name) for name in default.model_fields_set if name not in given}
    return kept | {name: _over(getattr(default, name, None), value) for name, value in given.items()}


M = TypeVar("M", bound=Section)


def complete(model: type[M]) -> type[M]:
    """`model` with what is announced for it in it, at every depth. Raises `PluginError` for a name that is taken."""
    inner: dict[str, type[Section]] = {}
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section) and (whole := complete(section)) is not section:
            inner[name] = whole
    for name, section in model.announced().items():
        if name in model.model_fields:
            raise PluginError(f"a package announces settings as {name!r}, which {model.__name__} has; uninstall it")
        inner[name] = section
    return cast(type[M], _with(model, tuple(inner.items()))) if inner else model


@cache
def _with(model: type[Section], inner: tuple[tuple[str, type[Section]], ...]) -> type[Section]:
    """One class for the same sections: settings are compared."""
    fields: dict[str, Any] = {name: (section, _start(model, name, section)) for name, section in inner}
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)


def _start(model: type[Section], name: str, section: type[Section]) -> Section:
    """What a section starts with, where that differs from its class."""
    default = model.model_fields[name].default if name in model.model_fields else None
    given = default.model_fields_set if isinstance(default, Section) else ()
    return section(**{one: getattr(default, one) for one in given})


class BusSettings(Section):
    """Where the bus is and how long to wait for it."""

    COMMON: ClassVar = ("address", "replication")

    address: str = "127.0.0.1:9092"
    """Kafka bootstrap address, ours or Apache Kafka's: `host:port`, several separated by commas."""
    username: str = "headrace"
    """User name at the bus, where it asks for a login."""
    password: SecretStr = SecretStr("")
    """Password at the bus (SASL); the embedded broker asks for it, too. `headrace up` makes one for the broker that it
    starts. Empty: no login."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """SASL mechanism of the login. The embedded broker knows `PLAIN`."""
    tls: bool = False
    """Whether connections to the bus are encrypted. The embedded broker has no TLS."""
    ca_file: str = ""
    """File with the certificates that the bus is checked with (PEM); empty: those of the system."""
    replication: Annotated[int, Field(ge=1)] = 1
    """Replication factor of topics that Headrace creates."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """How long one request to the bus may take before it counts as failed."""
    compression: Literal["none", "gzip"] = "none"
    """How producers compress batches; worth its CPU when the bus is across a network."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a service waits for the bus at its start."""
    session_timeout_s: Annotated[float, Field(ge=6, le=1800)] = 10.0
    """Silence after which a member of a consumer group is taken for dead and its partitions go to others. A service
    that was killed gets its own back only then. Brokers take 6 to 1800 s unless they are told otherwise."""


class DatabaseSettings(Section):
    """Where a service's own state lives."""

    COMMON: ClassVar = ("url",)

    url: SecretStr = SecretStr("sqlite")
    """`sqlite` for a file per service under `data_dir`, or `postgresql://user:password@host/database`."""
    pool_size: Annotated[int, Field(ge=1, le=100)] = 5
    """Connections per service (PostgreSQL only)."""


class BlobSettings(Section):
    """Where large content lives."""

    COMMON: ClassVar = ("url",)

    url: str = ""
    """An fsspec URL such as `s3://bucket/headrace`; empty for a folder under `data_dir`."""


class LogSettings(Section):
    """What is written to standard error, and how."""

    COMMON: ClassVar = ("level", "format")

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for people."""


class SecuritySettings(Section):
    """What services know about each other."""

    COMMON: ClassVar = ("internal_key",)

    internal_key: SecretStr = SecretStr("")
    """Bearer token between services, and for their metrics; required as soon as one of them listens beyond loopback."""
    hosts: tuple[HostPattern, ...] = ()
    """Further names that services answer to in the header `Host`, such as that of a proxy: a name, or `*.` and a
    domain. Addresses, `localhost` and the machine's name always count. Services beyond loopback answer to any name
    while it is empty, because they ask for keys."""
    origins: tuple[Origin, ...] = ()
    """Origins whose web pages may call services from a browser, such as `https://chat.example.com`."""
    replica_hosts: tuple[HostPattern, ...] = ()
    """Hosts of replicas that are called although their heartbeat is not signed with `internal_key`: a name, an address,
    or `*.` and a domain. Needed while replicas of an older release run."""


class DeadLetterSettings(Section):
    """How much of a tenant is dead-lettered before its refusals are kept back, until a restart or `POST /resume`."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    run_max: Annotated[int, Field(ge=0)] = 100
    """Records of one tenant refused in a row after which its further refusals are kept back; 0 never keeps any back."""
    share_max: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of a tenant's last `window` records above which its refusals are kept back; 1 never keeps any back."""
    window: Annotated[int, Field(ge=10, le=100_000)] = 500
    """Of how many records the share is taken, once there were so many."""

    @property
    def bounds(self) -> RefusalBounds:
        return RefusalBounds(self.run_max, self.share_max, self.window)


class Common(Section):
    """What all services share."""

    COMMON: ClassVar = ("data_dir",)

    data_dir: Path = Path(".headrace")
    """Everything that this machine keeps: databases, blobs, logs, the gateway's spool. For its owner alone."""
    disk_free_bytes_min: Annotated[int, Field(ge=4096)] | None = None
    """Bytes that stay free on the disk of `data_dir`: with less no service is ready, the embedded broker refuses
    records, services with SQLite take none, the trainer pauses before a save that would leave less, and no replica
    fetches such a version. Compacted topics and the gateway's spool go on down to half of it. All go on by themselves
    once there is room. None: the smaller of 1 GiB and 5 % of the disk."""
    services_elsewhere: tuple[str, ...] = ()
    """Services that are not installed here and have a section in this file all the same, besides Headrace's own: where
    each service has a machine or a container to itself."""
    bus: BusSettings = BusSettings()
    database: DatabaseSettings = DatabaseSettings()
    blobs: BlobSettings = BlobSettings()
    logs: LogSettings = LogSettings()
    security: SecuritySettings = SecuritySettings()
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    _table: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    def part_of(self, section: str, model: type[M]) -> M:
        """Return the settings of another section that `model` names, where the file of this process has them.

        Raises `SettingError` for what must not be there.
        """
        table = self._table.get(section)
        named = {name: value for name, value in table.items() if name in model.model_fields} if table else {}
        return _validate(model, named, f"{section}.")


class ServiceSettings(Section):
    """What every service's own section has."""

    host: str = "127.0.0.1"
    """Address that the service's HTTP listens on."""
    port: Port = 0
    """Its port; 0 lets the system choose."""
    header_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """How long the header of a request may take from its first byte; of the first one, from the connection on."""
    header_bytes_max: Annotated[int, Field(ge=4096)] = 16_384
    """Largest header of a request."""
    body_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """How long the body of a request may take to arrive."""


S = TypeVar("S", bound=ServiceSettings)


def load(service: str, model: type[S], path: Path | None, environ: Mapping[str, str] | None = None) -> tuple[Common, S]:
    """Read the file (none: defaults) and the environment; raise `SettingError` for anything that nobody would use."""
    environ = os.environ if environ is None else environ
    table = settings_table.read(path, environ)
    ours = (*Common.model_fields, *SERVICES, service)
    elsewhere = _validate(Common, {k: v for k, v in table.items() if k == "services_elsewhere"}, "").services_elsewhere
    for name, value in table.items():
        if name not in ours and name not in (known := (*ours, *services.SERVICES.names(), *elsewhere)):
            raise SettingError(name, value, f"unknown{_hint(name, known)}")
    common = _validate(Common, {k: v for k, v in table.items() if k in Common.model_fields}, "")
    common._table = table
    own = _validate(complete(model), table.get(service, {}), f"{service}.")
    _check_bind(service, own, common)
    return common, own


def host_fits(host: str, pattern: str) -> bool:
    """Return whether a host is the one that `pattern` names, or lies below its domain (`*.example.com`)."""
    host, pattern = host.lower().rstrip("."), pattern.lower()
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def secrets_of(*sections: BaseModel) -> set[str]:
    """Every value that is typed as a secret, at any depth, and the passwords in those that are URLs."""
    found: set[str] = set()
    for section in sections:
        for value in (getattr(section, name) for name in type(section).model_fields):
            if isinstance(value, BaseModel):
                found |= secrets_of(value)
            elif isinstance(value, tuple):
                found |= secrets_of(*(one for one in value if isinstance(one, BaseModel)))
            elif isinstance(value, SecretStr):
                text = value.get_secret_value()
                found |= secrets_of_url(text) if "://" in text else {text}
    return found - {"", "sqlite"}


def secrets_of_url(url: str) -> set[str]:
    """The password in a URL, as it stands and decoded."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return set()
    return {password, unquote(password)} if password else set()


def _validate(model: type[M], table: object, prefix: str) -> M:
    _check_numbers(model, table, prefix)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A misspelt name may well be the reason for what else is wrong.
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        where = [str(part) for part in first["loc"]]
        remedy = first["msg"].removeprefix("Value error, ")
        if first["type"] == "string_type" and isinstance(first["input"], int | float):
            remedy += "; put it in quotes"
        if first["type"] == "extra_forbidden":
            remedy = f"unknown{_hint(where[-1], _names_at(model, where[:-1]))}"
        raise SettingError(prefix + ".".join(where), first["input"], remedy) from None


def _check_numbers(model: type[BaseModel], table: object, prefix: str) -> None:
    """Raise `SettingError` for true or false where a number belongs: pydantic would read them as 1 and 0."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        field = model.model_fields.get(name)
        kinds = _plain_types(field.annotation) if field else set()
        if kinds & {int, float} and bool not in kinds:
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, bool):
                    raise SettingError(prefix + name, value, "must be a number, not true or false")
        for section in kinds:
            if isinstance(section, type) and issubclass(section, BaseModel):
                for item in value if isinstance(value, list) else (value,):
                    _check_numbers(section, item, f"{prefix}{name}.")


def _plain_types(annotation: object) -> set[Any]:
    """Return the types that an annotation is made of: of `tuple[int, ...] | None` int among others."""
    inner = [part for part in get_args(annotation) if part is not Ellipsis]
    if get_origin(annotation) is Literal:
        return {type(value) for value in inner}
    return set().union(*map(_plain_types, inner)) if inner else {annotation}


def _names_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _hint(name: str, known: tuple[str, ...] | list[str]) -> str:
    similar = closest(name, known)
    if similar:
        return f"; did you mean {similar!r}?"
    return f"; known here: {', '.join(sorted(set(known)))}" if known else ""


def _check_bind(service: str, own: ServiceSettings, common: Common) -> None:
    if not is_loopback(own.host) and not common.security.internal_key.get_secret_value():
        raise SettingError(
            f"{service}.host", own.host, "listens beyond this machine without a key; set security.internal_key"
        )
