"""A service's settings as data: what `--describe-settings` prints and `headrace config` turns into a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, JsonValue, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

Tier = Literal["common", "tuning", "limits"]
"""What a user sets; what changes how well or how fast it works; how much, how many or how long at most."""
_LIMIT = re.compile(r"(^|_)(max|min|timeout|retention|lease|ttl)(_|$)")
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


class SettingDoc(BaseModel):
    """One setting. `name` is its dotted path, `default` is None when it has none or when None is the default."""

    name: str
    kind: str
    default: JsonValue = None
    required: bool = False
    description: str = ""
    tier: Tier = "tuning"


def describe(model: type[BaseModel], prefix: str = "", instance: BaseModel | None = None) -> Iterator[SettingDoc]:
    """Every setting of a section, depth first, plain values before inner sections, as TOML wants them.

    `instance` is what the section starts with, where that differs from its class.
    """
    inner = []
    for name, field in model.model_fields.items():
        value = getattr(instance, name) if instance is not None else _default(field)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner.append((name, field.annotation, value if isinstance(value, BaseModel) else None))
        else:
            yield _doc(prefix + name, field, value, tier_of(model, name))
    for name, section, starts_with in inner:
        yield from describe(section, f"{prefix}{name}.", starts_with)


def tier_of(model: type[BaseModel], name: str) -> Tier:
    """A section says what is common in it, and whether all of it is limits; names say it of single ones."""
    if name in getattr(model, "COMMON", ()):
        return "common"
    return "limits" if _LIMIT.search(name) else getattr(model, "TIER", "tuning")


def _default(field: FieldInfo) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _doc(name: str, field: FieldInfo, value: object, tier: Tier) -> SettingDoc:
    annotated: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(annotated)
    return SettingDoc(
        name=name,
        kind=_kind(adapter.json_schema()),
        default=None if value is None else _shown(adapter, value),
        required=field.is_required(),
        description=" ".join((field.description or "").split()),
        tier=tier,
    )


def _shown(adapter: TypeAdapter[Any], value: object) -> Any:
    """A default is no secret, also where the setting is one."""
    return value.get_secret_value() if isinstance(value, SecretStr) else adapter.dump_python(value, mode="json")


def _kind(schema: dict[str, Any]) -> str:
    """A JSON Schema as a few words: `integer ≥ 1`, `"json" or "console"`, `list of string; installed: helpfulness`."""
    if "enum" in schema:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "$ref" in schema or schema.get("type") == "object":
        return "table"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    installed = f"; installed: {', '.join(names)}" if (names := schema.get("examples")) else ""
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "value"), *bounds]) + installed
