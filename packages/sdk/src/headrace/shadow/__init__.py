"""Training copies: a share of what users ask is played again by a copy of the agent, and the copy's runs are trained.

    runner = TrainingRunner(HeadraceDoor("http://127.0.0.1:8000", "my-agent"), make_agent, reward, repeat=4)
    with runner:
        ask = runner.watched(agent.run)
        print(ask("Where is my order?"))

Users are answered by their agent alone: nothing here slows or fails what they asked. What AgentScope's Java training
extension calls a shadow is a training copy here; the registry's shadow is an evaluation, and no part of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.practice.copies import ServedRequest, TrainingCopy
    from headrace.practice.doors import Door, HeadraceDoor, TrinityDoor
    from headrace.practice.read_only_tools import WriteRefused, read_only
    from headrace.shadow.runner import CopyCounts, TrainingRunner
    from headrace.shadow.selection import (
        ExplicitMarkingStrategy,
        SamplingRateStrategy,
        SelectionStrategy,
        mark,
    )
else:
    names = {
        "headrace.practice.copies": ("ServedRequest", "TrainingCopy"),
        "headrace.practice.doors": ("Door", "HeadraceDoor", "TrinityDoor"),
        "headrace.practice.read_only_tools": ("WriteRefused", "read_only"),
        "headrace.shadow.runner": ("CopyCounts", "TrainingRunner"),
        "headrace.shadow.selection": (
            "ExplicitMarkingStrategy", "SamplingRateStrategy", "SelectionStrategy", "mark",
        ),
    }  # fmt: skip
    __getattr__, __dir__ = lazily(__name__, names)

__all__ = [
    "CopyCounts", "Door", "ExplicitMarkingStrategy", "HeadraceDoor", "SamplingRateStrategy", "SelectionStrategy",
    "ServedRequest", "TrainingCopy", "TrainingRunner", "TrinityDoor", "WriteRefused", "mark", "read_only",
]  # fmt: skip
