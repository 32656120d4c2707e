"""The section `[console]`, and the roles and scopes of its users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, SecretStr, model_validator

from headrace_console.service import INFO
from headrace_runtime.settings.sections import Port, Section, ServiceSettings, is_loopback

Role = Literal["rater", "viewer", "reviewer", "operator"]
"""Roles from the fewest rights to the most. A role includes the rights of the roles before it."""
_ROLES: tuple[Role, ...] = get_args(Role)
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")]
ServiceUrl = Annotated[str, Field(pattern=r"^http://[A-Za-z0-9.\[\]:-]{1,255}$")]


@dataclass(frozen=True, slots=True)
class Scope:
    """The tenants whose records a user may read. None means all tenants."""

    tenants: frozenset[str] | None = None

    def permits(self, tenant: str) -> bool:
        """Return whether records of `tenant` may be read."""
        return self.tenants is None or tenant in self.tenants


@dataclass(frozen=True, slots=True)
class User:
    """A person who is logged in."""

    name: str
    role: Role
    scope: Scope
    form_token: str
    """Secret of the session that every form must contain."""

    def has_role(self, role: Role) -> bool:
        """Return whether the user has at least the rights of `role`."""
        return _ROLES.index(self.role) >= _ROLES.index(role)


class UserSettings(Section):
    """One user of the console. The settings contain only the token's digest: `printf %s "$TOKEN" | sha256sum`."""

    name: Name
    """Name under which the user's decisions are recorded."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the token in hexadecimal. Choose a random token of at least 128 bits."""
    role: Role = "viewer"
    """`viewer` reads, `reviewer` also sends feedback, `operator` also decides about versions. `rater` sees only what it
    is asked to rate."""
    tenants: tuple[Name, ...] = ()
    """Tenants whose records the user may read; empty for all."""


class ConsoleSettings(ServiceSettings):
    """Users of the console, its port, and the addresses of the other services."""

    port: Port = INFO.port
    """Port of the service's HTTP; 0 lets the system choose."""
    users: tuple[UserSettings, ...] = ()
    """Users besides the owner of the stack, who logs in with the address that `headrace up` prints."""
    read_only: bool = False
    """Whether the console refuses every change, whatever the role."""
    titles: bool = True
    """Whether the list of sessions shows the first 80 characters of each session, which are then in the console's
    database. Without them it shows session ids, and the console stores no text of users."""
    retention_days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Days for which the console stores a session after it has read the last event about it. Beyond ten million turns
    the oldest sessions are deleted earlier."""
    gateway_keys: dict[Name, SecretStr] = Field(default_factory=dict)
    """API key of the gateway by tenant, with the scope `feedback` for feedback of reviewers, and `chat` for answers of
    other versions. The tenant `default` needs none where services share `security.internal_key`."""
    behind_tls: bool = False
    """Whether browsers reach the console through a proxy with TLS, so that cookies are sent over TLS alone. Required if
    the console listens beyond this machine."""
    urls: dict[str, ServiceUrl] = Field(default_factory=dict)
    """Addresses of services by name, such as `registry = "http://registry:8020"`. Services without one are expected on
    this machine at the port of their section."""

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if is_loopback(self.host):
            return self
        if not self.users:
            raise ValueError("listens beyond this machine without users; set console.users")
        if not self.behind_tls:
            raise ValueError(
                "listens beyond this machine without TLS; put a proxy with TLS before it and set console.behind_tls"
            )
        return self

    @model_validator(mode="after")
    def _check_users(self) -> Self:
        names = [user.name for user in self.users]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"users: {', '.join(repeated)} is listed twice; a name belongs to one user")
        return self
