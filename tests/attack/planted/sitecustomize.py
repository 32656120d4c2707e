"""Planted faults: Python imports this module at the start of each process whose PYTHONPATH contains this folder.

Each fault breaks one promise that `tests.attack.attacks.any_input` checks, so that its result lines have to detect it.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

_RARE = 0.02


def _plant_in_gateway() -> None:
    from headrace_gateway.access.refusals import ApiError
    from headrace_gateway.apis.chat import Chat

    call = Chat._call

    def failing(self: Chat, scope: Any, admitted: Any, request: Any, *more: Any) -> Any:
        session = str((request.metadata or {}).get("session_id"))
        if session.startswith("alice-") and random.random() < _RARE:
            raise ApiError(418, "planted", "another tenant's call fails")
        return call(self, scope, admitted, request, *more)

    Chat._call = failing  # type: ignore[assignment,method-assign]


def _plant_in_scorer() -> None:
    from headrace_schemas.values.errors import InvalidEvent
    from headrace_scorer.handlers import Scorer

    handle = Scorer.on_feedback
    ended_once = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) / "planted-end-of-the-scorer"

    async def failing(self: Scorer, event: Any, handling: Any) -> Any:
        chance = random.Random(event.event_id).random()
        if chance < _RARE:
            raise InvalidEvent("planted", "an acknowledged event is dead-lettered")
        if chance < 5 * _RARE:
            return ()  # it vanishes
        if chance < 6 * _RARE:
            deadline = time.thread_time() + 1.5  # of CPU time, which is what the gauge counts as busy
            while time.thread_time() < deadline:
                pass  # the loop is blocked
        if chance > 0.5 and not ended_once.exists():  # it ends once; the event comes again after the restart
            ended_once.touch()
            os._exit(3)
        return await handle(self, event, handling)

    Scorer.on_feedback = failing  # type: ignore[assignment,method-assign]


if "headrace_gateway" in sys.orig_argv:
    _plant_in_gateway()
if "headrace_scorer" in sys.orig_argv:
    _plant_in_scorer()
