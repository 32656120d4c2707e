"""Engines by name: whatever an installed package announces under the entry points `headrace.engines`.

An announcement is light; `make` imports the engine, and torch with it. What an engine can do, it says itself
(`Engine.resumes`, `Engine.capacity`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_runtime.registries import Registry
from headrace_runtime.settings import Section

if TYPE_CHECKING:
    from headrace_inference.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine. `settings` are its own: the section `[inference.<name>]`."""

    make: Callable[[Any], Engine]
    """Gets the section. Called once, inside the running event loop; whoever calls it stops the engine."""
    settings: type[Section]


ENGINES: Registry[EngineKind] = Registry("engines", EngineKind, "engine")
