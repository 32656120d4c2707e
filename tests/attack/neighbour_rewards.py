"""Reward function that returns the hostile result named in the context of the attacker's trajectory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headrace_schemas import Trajectory

HOSTILE = "mallory"


class Unprintable(Exception):
    """Exception whose text cannot be read: `str()` raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


def strange(trajectory: Trajectory, context: Mapping[str, Any]) -> object:
    """Return 0.5 for other tenants. For the attacker, return or raise what `context["result"]` names."""
    if trajectory.tenant != HOSTILE:
        return 0.5
    match context.get("result"):
        case "huge":
            return {"a": 1.7e308, "b": 1.7e308}
        case "nul":
            raise ValueError("a\x00b")
        case "surrogate":
            raise ValueError("bad \ud83d end")
        case "unprintable":
            raise Unprintable
        case "exit":
            raise SystemExit(3)
        case "leave":
            os._exit(3)
        case "many":
            return {f"criterion-{number}\x00": 1.0 for number in range(65)}
        case "deep":
            raise RecursionError("x" * 100_000)
    return 0.5
