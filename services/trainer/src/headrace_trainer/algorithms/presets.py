"""Algorithms by name: the entry points `headrace.algorithms` of installed packages.

An algorithm is a kind of advantage and a loss, each with a registry of its own (`estimators.py`, `losses.py`), and
defaults of other settings. Settings of the user take precedence over these defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, JsonValue

from headrace_runtime.registries import Registry


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A preset. `defaults` are settings of `[trainer]` by their dotted names: `{"advantage.scale": "none"}`."""

    advantage: str
    loss: str = "clipped"
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)

    def under(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return `settings`, the user's table `[trainer]`, with the algorithm's values for settings that it lacks."""
        table: dict[str, Any] = {}
        for name, value in {"advantage.kind": self.advantage, "loss.kind": self.loss, **self.defaults}.items():
            *path, last = name.split(".")
            inner = table
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return _merge(table, settings)


ALGORITHMS: Registry[Algorithm] = Registry("algorithms", Algorithm, "algorithm")

REINFORCE_PP = Algorithm("reinforce++")
GRPO = Algorithm("grpo")
DR_GRPO = Algorithm("grpo", defaults={"advantage.scale": "none"})
"""GRPO without the group's standard deviation in the denominator (arXiv:2503.20783)."""
RLOO = Algorithm("rloo")


def _merge(defaults: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in settings.items():
        default = merged.get(name)
        if isinstance(default, dict) and isinstance(value, BaseModel):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        if isinstance(default, dict) and isinstance(value, Mapping):
            merged[name] = _merge(default, value)
        elif not (name == "kind" and value == "" and default):  # "" leaves the choice to the algorithm
            merged[name] = value
    return merged
