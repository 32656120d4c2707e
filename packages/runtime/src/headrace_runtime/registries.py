"""Registries of what installed packages announce by name: one for each kind of extension.

A package announces with an entry point, and ours do it in the same way:

    [project.entry-points."headrace.losses"]
    cispo = "my_package.losses:CISPO"

Names are known without importing anything. What is behind a name is imported when it is asked for, and has to be light
to import: what is heavy it imports itself, when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from headrace_runtime.errors import HeadraceError
from headrace_schemas.text import closest

PREFIX = "headrace."
T = TypeVar("T")
_Groups = dict[str, dict[str, tuple[EntryPoint, ...]]]


class PluginError(HeadraceError, ValueError):
    """Nobody announces a name, or what is announced cannot be used. In a setting, it stops the start."""


class Registry(Generic[T]):
    """Of one entry-point `group`. `kind` is the class of what it holds, `what` the word for it in messages."""

    def __init__(self, group: str, kind: type[T], what: str) -> None:
        self.group = f"{PREFIX}{group}"
        self.what = what
        self._kind = kind

    def names(self) -> tuple[str, ...]:
        """Sorted. Nothing is imported."""
        return tuple(sorted(self._announced()))

    def get(self, name: str) -> T:
        """What is announced as `name`. Raises `PluginError`."""
        point = self.point(name)
        try:
            found = point.load()
        except Exception as error:
            raise PluginError(
                f"{_said(point)} announces the {self.what} {name!r} as {point.value}, which cannot be imported: "
                f"{type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if not isinstance(found, self._kind):
            wanted = f"{self._kind.__module__}.{self._kind.__qualname__}"
            raise PluginError(
                f"{_said(point)} announces {point.value} as the {self.what} {name!r}; it has to be a {wanted} and is a "
                f"{type(found).__name__}; repair or uninstall it"
            )
        return found

    def all(self) -> dict[str, T]:
        """Everything that is announced, by name. Raises `PluginError`."""
        return {name: self.get(name) for name in self.names()}

    def point(self, name: str) -> EntryPoint:
        """The one announcement of `name`, not imported. Raises `PluginError`."""
        announced = self._announced()
        if name not in announced:
            similar = closest(name, announced)
            hint = f"did you mean {similar!r}? " if similar else ""
            known = ", ".join(sorted(announced)) or "none"
            raise PluginError(f"no installed package announces the {self.what} {name!r}; {hint}there are {known}")
        first, *others = announced[name]
        if others:
            owners = " and ".join(_said(point) for point in announced[name])
            raise PluginError(f"{owners} both announce the {self.what} {name!r}; uninstall one of them")
        return first

    def _announced(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return _read(tuple(sys.path)).get(self.group, {})


@dataclass(frozen=True, slots=True)
class NameIn:
    """`Annotated[str, NameIn(registry)]` is a setting: one of the names that are announced. What is behind it is
    imported when the setting is read, so that a broken package stops the start."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": list(self.registry.names())}

    def _checked(self, name: str) -> str:
        self.registry.get(name)
        return name


@dataclass(frozen=True, slots=True)
class OrNameIn:
    """`Annotated[str, OrNameIn(registry)]` is a setting: a name that is announced, or something else, such as a path.
    Whoever uses the setting tells them apart; the reference lists the names."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "examples": list(self.registry.names())}


@lru_cache(maxsize=4)
def _read(_path: tuple[str, ...]) -> _Groups:
    """Read once for what can be imported: a process asks again and again, and reading takes milliseconds."""
    found: _Groups = {}
    seen: set[str] = set()
    for distribution in distributions():
        points = [point for point in distribution.entry_points if point.group.startswith(PREFIX)]
        if not points or (owner := distribution.name.lower().replace("_", "-")) in seen:
            continue  # of two copies the first one is the one that is imported
        seen.add(owner)
        for point in points:
            names = found.setdefault(point.group, {})
            names[point.name] = (*names.get(point.name, ()), point)
    return found


def _said(point: EntryPoint) -> str:
    """The distribution that announces it."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else f"the package of {point.value}"
