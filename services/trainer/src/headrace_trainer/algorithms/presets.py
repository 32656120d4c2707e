"""Algorithms by name: whatever an installed package announces under the entry points `headrace.algorithms`.

An algorithm is a kind of advantage and a loss, each with a registry of its own (`estimators.py`, `losses.py`), and
defaults of other settings. What somebody sets wins over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, JsonValue

from headrace_runtime.registries import Registry


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One preset. `defaults` are settings of `[trainer]` by their dotted names: `{"advantage.scale": "none"}`."""

    advantage: str
    loss: str = "clipped"
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)

    def under(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given`, the table of `[trainer]`, on top of what the algorithm says."""
        table: dict[str, Any] = {}
        for name, value in {"advantage.kind": self.advantage, "loss.kind": self.loss, **self.defaults}.items():
            *path, last = name.split(".")
            inner = table
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return _over(table, given)


ALGORITHMS: Registry[Algorithm] = Registry("algorithms", Algorithm, "algorithm")

REINFORCE_PP = Algorithm("reinforce++")
GRPO = Algorithm("grpo")
DR_GRPO = Algorithm("grpo", defaults={"advantage.scale": "none"})
"""Without the group's standard deviation in the denominator (arXiv:2503.20783)."""
RLOO = Algorithm("rloo")


def _over(below: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in given.items():
        beneath = merged.get(name)
        if isinstance(beneath, dict) and isinstance(value, BaseModel):
            value = {one: getattr(value, one) for one in value.model_fields_set}
        if isinstance(beneath, dict) and isinstance(value, Mapping):
            merged[name] = _over(beneath, value)
        elif not (name == "kind" and value == "" and beneath):  # "" leaves the choice to the algorithm
            merged[name] = value
    return merged
