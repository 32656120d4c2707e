"""Options of `headrace demo` and the arguments of the demo that they set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_cli.commands import demo as command
from headrace_cli.demo import recipe

FOLDER = Path(__file__).parents[3] / "examples" / "email_agent"


@pytest.mark.parametrize("wanted_s", [None, 7.0])
@pytest.mark.parametrize("short", [True, False])
def test_how_long_the_agent_works(monkeypatch: pytest.MonkeyPatch, short: bool, wanted_s: float | None) -> None:
    seen: list[Any] = []

    def play(_recipe: object, options: Any, **_how: object) -> bool:
        seen.append(options.goal)
        return True

    monkeypatch.setattr(command, "_play_one_seed", play)
    command.demo(FOLDER, short=short, traffic_s=wanted_s)
    demo_recipe = recipe.read(FOLDER)
    stop_condition = demo_recipe.short if short else demo_recipe.goal
    assert seen == [stop_condition.model_copy(update={"traffic_s_max": wanted_s or stop_condition.traffic_s_max})]
