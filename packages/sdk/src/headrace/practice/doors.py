"""Earlier names of `headrace.practice.sinks`, which existing programs import."""

from __future__ import annotations

from headrace.practice.sinks import HeadraceSink as HeadraceDoor
from headrace.practice.sinks import TrajectorySink as Door
from headrace.practice.sinks import TrinitySink as TrinityDoor

__all__ = ["Door", "HeadraceDoor", "TrinityDoor"]
