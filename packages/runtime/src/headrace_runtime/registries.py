"""Registries of extensions that installed packages announce by name, one for each kind of extension.

Each package, Headrace's own included, announces an extension with an entry point:

    [project.entry-points."headrace.losses"]
    cispo = "my_package.losses:CISPO"

Names are available without importing anything. An extension is imported on first use, and its module must be cheap to
import: it has to import heavy dependencies itself when it needs them.
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
from headrace_schemas.values.text import closest

PREFIX = "headrace."
T = TypeVar("T")
_Groups = dict[str, dict[str, tuple[EntryPoint, ...]]]


class PluginError(HeadraceError, ValueError):
    """Raised if an extension cannot be used: no installed package provides its name, or it fails to load.

    If a setting names the extension, the service does not start.
    """


class Registry(Generic[T]):
    """Extensions of one entry-point group. Each is imported on first use."""

    def __init__(self, group: str, kind: type[T], noun: str) -> None:
        """Create the registry of one kind of extension.

        Args:
            group: the entry-point group of the extensions without its prefix `headrace.`, for example `losses`.
            kind: the class of the extensions.
            noun: the word that messages use for an extension, for example `reward source`.
        """
        self.group = f"{PREFIX}{group}"
        self.noun = noun
        self._kind = kind

    def names(self) -> tuple[str, ...]:
        """Return the announced names, sorted, without importing the extensions."""
        return tuple(sorted(self._entry_points()))

    def get(self, name: str) -> T:
        """Import the extension `name`.

        Raises:
            PluginError: the name is not announced exactly once, or the extension cannot be used.
        """
        point = self.point(name)
        try:
            extension = point.load()
        except Exception as error:
            raise PluginError(
                f"{_owner(point)} announces the {self.noun} {name!r} as {point.value}, which cannot be imported: "
                f"{type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if not isinstance(extension, self._kind):
            expected = f"{self._kind.__module__}.{self._kind.__qualname__}"
            raise PluginError(
                f"{_owner(point)} announces {point.value} as the {self.noun} {name!r}; it has to be a {expected} and "
                f"is a {type(extension).__name__}; repair or uninstall it"
            )
        return extension

    def all(self) -> dict[str, T]:
        """Import all extensions and return them by name. Raises `PluginError`."""
        return {name: self.get(name) for name in self.names()}

    def point(self, name: str) -> EntryPoint:
        """Return the entry point `name` without importing the extension. Raises `PluginError`."""
        announced = self._entry_points()
        if name not in announced:
            similar = closest(name, announced)
            hint = f"did you mean {similar!r}? " if similar else ""
            names = ", ".join(sorted(announced)) or "none"
            raise PluginError(f"no installed package announces the {self.noun} {name!r}; {hint}there are {names}")
        points = announced[name]
        if len(points) > 1:
            owners = " and ".join(map(_owner, points))
            raise PluginError(f"{owners} both announce the {self.noun} {name!r}; uninstall one of them")
        return points[0]

    def _entry_points(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return _read(tuple(sys.path)).get(self.group, {})


@dataclass(frozen=True, slots=True)
class NameIn:
    """Annotation for a setting whose value is the name of an extension: `Annotated[str, NameIn(registry)]`.

    Validating the setting imports the extension, so that a broken package stops the start.
    """

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check_name, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": list(self.registry.names())}

    def _check_name(self, name: str) -> str:
        self.registry.get(name)
        return name


@dataclass(frozen=True, slots=True)
class OrNameIn:
    """Annotation for a setting whose value is the name of an extension or another text, such as a path.

    `Annotated[str, OrNameIn(registry)]` accepts each string, and the service that uses the setting distinguishes the
    two. The settings reference lists the names.
    """

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "examples": list(self.registry.names())}


@lru_cache(maxsize=4)
def _read(_path: tuple[str, ...]) -> _Groups:
    """Return the entry points of all installed packages in groups of Headrace, by group and name.

    The result is cached per import path, because reading takes milliseconds.
    """
    groups: _Groups = {}
    seen: set[str] = set()
    for distribution in distributions():
        points = [point for point in distribution.entry_points if point.group.startswith(PREFIX)]
        if not points or (owner := distribution.name.lower().replace("_", "-")) in seen:
            continue  # Python imports only the first of two copies
        seen.add(owner)
        for point in points:
            names = groups.setdefault(point.group, {})
            names[point.name] = (*names.get(point.name, ()), point)
    return groups


def _owner(point: EntryPoint) -> str:
    """Return the distribution that provides an entry point, for messages."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else f"the package of {point.value}"
