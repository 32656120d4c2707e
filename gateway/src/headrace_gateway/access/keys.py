"""Identification of callers by API key digests, with tenant and scopes, and a check of the keys before the start."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.settings import GatewaySettings, KeySettings, LimitSettings, Scope
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common, Section, is_loopback
from headrace_runtime.settings.source_values import SourceValues
from headrace_runtime.settings.table import read_toml
from headrace_schemas.values.ids import decode_name

_AGENTS: frozenset[Scope] = frozenset(("chat", "feedback"))
ALL_SCOPES: frozenset[Scope] = _AGENTS | {"admin"}


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner and the permissions of a request's API key. `key_id` identifies the key without revealing it."""

    key_id: str
    name: str
    tenant: str
    scopes: frozenset[Scope]
    session_id: str | None
    limits: LimitSettings
    models: frozenset[str] = frozenset()

    @property
    def is_anonymous(self) -> bool:
        """Whether the caller is anonymous, because no keys are configured and the request does not carry the internal
        key."""
        return self.key_id == "open"

    def may_use(self, model: str) -> bool:
        """Return whether the key may call `model`. A key without a list of models may call all."""
        return not self.models or model in self.models

    def require_scope(self, scope: Scope) -> None:
        """Check that the key has `scope` or the scope `admin`, which includes all others.

        Raises:
            ApiError: 403, or 401 for a request without a key.
        """
        if scope not in self.scopes and "admin" not in self.scopes:
            if self.is_anonymous:
                raise ApiError(401, "missing_api_key", "this request needs the bearer token of security.internal_key")
            raise ApiError(403, "missing_scope", f"this API key lacks the scope {scope!r}; use one that has it")

    def check_session(self, session_id: str | None, field: str) -> None:
        """Check that the session that a request names is the one that its key is bound to. A key without a session may
        name any.

        Args:
            session_id: The session that the request names, or None.
            field: The name of the request's field, for the error.

        Raises:
            ApiError: 403, the key is bound to another session.
        """
        if self.session_id is not None and session_id not in (None, self.session_id):
            message = f"{field}: this API key is bound to one session and may name no other; leave {field} out"
            raise ApiError(403, "wrong_session", message, field)

    def check_unbound(self, action: str) -> None:
        """Check that the key is not bound to one session, for a request that acts on several sessions.

        Args:
            action: The name of the request, for the error.

        Raises:
            ApiError: 403, the key is bound to one session.
        """
        if self.session_id is not None:
            raise ApiError(403, "wrong_session", f"{action} is about several sessions; this API key is bound to one")


class KeyRing:
    """All API keys of this gateway, by their SHA-256 digests.

    Without keys, every caller is the tenant `default` with every scope. If services share an internal key, only that
    key has the scope `admin`.
    """

    def __init__(self, keys: Iterable[KeySettings], default_limits: LimitSettings, internal_key: str = "") -> None:
        self._callers = {key.sha256: _caller(key, default_limits) for key in keys}
        scopes = _AGENTS if internal_key else ALL_SCOPES
        self._open = None if self._callers else Caller("open", "open", "default", scopes, None, default_limits)
        self._salt_key = b"headrace cache salt\0" + internal_key.encode()
        if internal_key:
            digest = _digest(internal_key)
            self._callers[digest] = Caller(digest, "internal", "default", ALL_SCOPES, None, default_limits)

    def identify(self, path_key: str | None, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller by the key in the path (`/t/{key}/...`), else by the bearer token, else by `x-api-key`.

        The path has precedence, because clients that can send a key only there also send a meaningless bearer token.

        Raises:
            ApiError: 401, the key is missing or unknown.
        """
        key = path_key
        if key is None:
            kind, _, token = decode_name(headers.get(b"authorization", b"")).partition(" ")
            key = token.strip(" \t") if kind.lower() == "bearer" else ""
            key = key or decode_name(headers.get(b"x-api-key", b"")).strip(" \t")
        if self._open is not None:  # without configured keys, agents send arbitrary ones
            return self._callers.get(_digest(key), self._open) if key and self._callers else self._open
        if not key:
            raise ApiError(
                401,
                "missing_api_key",
                "no API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY', or put /t/KEY before the path",
            )
        caller = self._callers.get(_digest(key))
        if caller is None:
            raise ApiError(401, "invalid_api_key", "this API key is not known here")
        return caller

    def cache_salt(self, tenant: str) -> str:
        """Return the salt that separates a tenant's prompts from those of other tenants in the prefix caches of
        replicas.

        The salt does not reveal the tenant. All gateways with the same `security.internal_key` compute the same salt.
        """
        return hmac.new(self._salt_key, tenant.encode(), hashlib.sha256).hexdigest()[:32]


class _KeysFile(Section):
    keys: tuple[KeySettings, ...]


def share_of_tenant(settings: GatewaySettings, keys: Sequence[KeySettings]) -> float | None:
    """Return the part of `limits_total` that each tenant may use, or None while all keys belong to one tenant."""
    return settings.tenant_share if len({key.tenant for key in keys}) > 1 else None


def read_keys(settings: GatewaySettings) -> tuple[KeySettings, ...]:
    """Return the keys of the settings and of `keys_file`.

    Raises:
        SettingError: the file cannot be read, two keys have the same name or digest, or there are no keys and
            `gateway.host` is not loopback.
    """
    keys = settings.keys + (_read_file(Path(settings.keys_file)) if settings.keys_file else ())
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise SettingError(f"gateway.keys.{field}", twice, "is used by two keys; give each key its own")
    if not keys and not is_loopback(settings.host):
        raise SettingError("gateway.host", settings.host, "listens beyond this machine without keys; set gateway.keys")
    return keys


def _read_file(path: Path) -> tuple[KeySettings, ...]:
    try:
        return _KeysFile.model_validate(read_toml(path)).keys
    except OSError as error:
        raise SettingError("gateway.keys_file", str(path), f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingError("gateway.keys_file", str(path), f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise SettingError("gateway.keys_file", str(path), str(error)) from None


def _caller(key: KeySettings, default_limits: LimitSettings) -> Caller:
    limits = key.limits or default_limits
    return Caller(
        key.sha256, key.name, key.tenant, frozenset(key.scopes), key.session_id or None, limits, frozenset(key.models)
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def check(common: Common, settings: GatewaySettings) -> list[str]:
    """Check that the keys and the reward ranges in `scorer` can be read. Return an empty list of notes. Raises
    `SettingError`."""
    common.section_of("scorer", SourceValues)
    read_keys(settings)
    return []
