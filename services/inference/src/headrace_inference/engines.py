"""Registry of the engines that installed packages announce under the entry points `headrace.engines`.

An entry point must be fast to import; only `make` imports the engine, and torch with it. The engine's attributes
describe its abilities (`Engine.resumes`, `Engine.capacity`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section

if TYPE_CHECKING:
    from headrace_inference.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that a package announces: its class of settings, and the function that starts it."""

    make: Callable[[Any], Engine]
    """Function that starts the engine with its settings. It is called once, inside the running event loop. The caller
    must stop the engine."""
    settings: type[Section]
    """Class of the engine's settings, which are the section `[inference.<name>]`."""


ENGINES: Registry[EngineKind] = Registry("engines", EngineKind, "engine")
