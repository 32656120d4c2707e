"""Users of the console: their roles, and the tenants whose records they may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["rater", "viewer", "reviewer", "operator"]
"""Roles from the fewest rights to the most. A role includes the rights of the roles before it."""
_ROLES: tuple[Role, ...] = get_args(Role)


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
