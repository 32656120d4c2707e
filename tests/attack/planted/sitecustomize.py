"""Faults for a stack whose PYTHONPATH has this folder; Python imports the module at the start of each process.

Each fault breaks one promise that `tests.attack.attacks.any_input` measures, so that its lines are known to notice.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

_RARE = 0.02


def _plant_in_gateway() -> None:
    from headrace_gateway.chat import Chat
    from headrace_gateway.refusals import ApiError

    call = Chat._call

    def failing(self: Chat, *arguments: Any, **named: Any) -> Any:
        if random.random() < _RARE:
            raise ApiError(418, "planted", "another tenant's call fails")
        return call(self, *arguments, **named)

    Chat._call = failing  # type: ignore[method-assign]


def _plant_in_scorer() -> None:
    from headrace_schemas.errors import InvalidEvent
    from headrace_scorer.handlers import Scorer

    handle = Scorer.on_feedback
    started = time.monotonic()

    async def failing(self: Scorer, event: Any, handling: Any) -> Any:
        chance = random.Random(event.event_id).random()
        if chance < _RARE:
            raise InvalidEvent("planted", "an acknowledged event is dead-lettered")
        if chance < 5 * _RARE:
            return ()  # it vanishes
        if chance < 6 * _RARE:
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                pass  # the loop is blocked
        if chance < 7 * _RARE and time.monotonic() < started + 60:
            os._exit(3)
        return await handle(self, event, handling)

    Scorer.on_feedback = failing  # type: ignore[assignment,method-assign]


if "headrace_gateway" in sys.orig_argv:
    _plant_in_gateway()
if "headrace_scorer" in sys.orig_argv:
    _plant_in_scorer()
