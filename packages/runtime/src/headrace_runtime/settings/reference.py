"""Description of a service's settings as data, which `--describe-settings` prints and `headrace config` formats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, JsonValue, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

from headrace_runtime.settings.table import parameters_of

Tier = Literal["common", "tuning", "limits"]
"""Kind of a setting: `common` ones are set by most users, `tuning` affects quality or speed, `limits` are bounds."""
_LIMIT = re.compile(r"(^|_)(max|min|timeout|retention|lease|ttl)(_|$)")
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


class SettingDoc(BaseModel):
    """Description of one setting. `name` is its dotted path. `default` is None if there is no default, or if the
    default is None."""

    name: str
    kind: str
    value_schema: dict[str, JsonValue] = {}
    """JSON Schema of the value; `kind` is its summary."""
    default: JsonValue = None
    required: bool = False
    description: str = ""
    tier: Tier = "tuning"
    shared: bool = False
    """Whether the enclosing table has a setting of the same name. A settings file is generated without this one."""


def describe(model: type[BaseModel], prefix: str = "", instance: BaseModel | None = None) -> Iterator[SettingDoc]:
    """Yield the descriptions of the settings of a section, depth first, with plain values before inner sections, as
    TOML requires.

    Args:
        model: the class of the section.
        prefix: the dotted path of the section, with a dot at its end.
        instance: the default of the section, if it differs from the defaults of its class.
    """
    inner = []
    for name, field in model.model_fields.items():
        if name in parameters_of(model):
            continue
        value = getattr(instance, name) if instance is not None else _default(field)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner.append((name, field.annotation, value if isinstance(value, BaseModel) else None))
        else:
            yield _doc(prefix + name, field, value, tier_of(model, name), name in getattr(model, "SHARED", ()))
    for name, section, default in inner:
        yield from describe(section, f"{prefix}{name}.", default)


def tier_of(model: type[BaseModel], name: str) -> Tier:
    """Return the tier of a setting: from `Section.COMMON`, from a name that denotes a limit, or from `Section.TIER`."""
    if name in getattr(model, "COMMON", ()):
        return "common"
    return "limits" if _LIMIT.search(name) else getattr(model, "TIER", "tuning")


def _default(field: FieldInfo) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _doc(name: str, field: FieldInfo, value: object, tier: Tier, shared: bool) -> SettingDoc:
    annotated: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(annotated)
    value_schema = adapter.json_schema()
    return SettingDoc(
        name=name,
        kind=_kind(value_schema),
        value_schema=value_schema,
        default=None if value is None else _json_value(adapter, value),
        required=field.is_required(),
        description=" ".join((field.description or "").split()),
        tier=tier,
        shared=shared,
    )


def _json_value(adapter: TypeAdapter[Any], value: object) -> Any:
    """Return a default as a JSON value, also for a secret setting, because defaults are not secret."""
    return value.get_secret_value() if isinstance(value, SecretStr) else adapter.dump_python(value, mode="json")


def _kind(schema: dict[str, Any]) -> str:
    """Return a short description of a JSON Schema, such as `integer ≥ 1`, `"json" or "console"` or `list of string;
    installed: helpfulness`."""
    if "enum" in schema:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "$ref" in schema or schema.get("type") == "object":
        return "table"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    installed = f"; installed: {', '.join(names)}" if (names := schema.get("examples")) else ""
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "value"), *bounds]) + installed
