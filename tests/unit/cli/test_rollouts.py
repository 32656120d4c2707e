"""The chart of a rollout in letters, and the line for a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_cli.commands.rollouts import status_line
from headrace_operations.rollouts import chart, shadow
from headrace_runtime import rollout_picture
from headrace_schemas.rollout_api import ChartPoint, RolloutState, ShadowState
from tests.unit.sdk.test_rollouts import rollout


def watched(points: int) -> RolloutState:
    """An interval that closes around -0.2."""
    found = tuple(
        ChartPoint(units=number, metrics={"reward": (-0.2, -0.2 - 2 / number, -0.2 + 2 / number)})
        for number in range(1, points + 1)
    )
    return rollout("canary").model_copy(update={"chart": found})


@pytest.mark.parametrize("points", [1, 30, 500])
def test_the_chart_has_its_size_zero_and_the_margin(points: int) -> None:
    lines = chart.draw_lines(watched(points), "reward", width=60, height=15)
    assert len(lines) == 17
    assert max(map(len, lines)) <= 10 + max(60, len(lines[-1]))
    assert sum("●" in line for line in lines) >= 1
    assert any(line.strip().startswith("0 ┤") for line in lines)
    assert any(line.strip().startswith("-0.1 ┤") for line in lines) or points == 1, "the margin, once there is room"


def test_where_less_is_better_the_margin_is_above() -> None:
    worse = rollout("canary").model_copy(update={"margins": {"loops": 0.1}, "higher_is_better": {"loops": False}})
    assert rollout_picture.margin(worse, "loops") == 0.1
    assert rollout_picture.margin(watched(1), "reward") == -0.1
    assert rollout_picture.margin(watched(1), "latency") is None


def test_before_the_first_reading_it_says_so() -> None:
    assert chart.draw_lines(rollout("canary"), "reward") == [
        "reward: no session has reached the age at which it is read"
    ]
    assert "not read yet" in status_line(rollout("canary"), None)


def test_the_end_is_in_the_line() -> None:
    assert status_line(rollout("rolled_back"), "success").endswith("success +0.200 in [+0.100, +0.300]  so")


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert rollout_picture.picture(watched(40), "reward", tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 1000


def shadowed(**found: object) -> RolloutState:
    state = {"prompts": 44, "read": 41, "pairs": 40, "spoke": 30, "tokens": 9, "effective": 28.4, "mean_weight": 1.0}
    return rollout("canary").model_copy(
        update={"shadow_units": 40, "shadow": ShadowState.model_validate({**state, **found})}
    )


def test_what_the_shadow_found_is_said_with_its_interval() -> None:
    found = shadowed(judged=0.1, difference=0.05, lower=-0.02, upper=0.12, ended={"candidate: other_call": 1})
    said = "\n".join(shadow.lines(found))
    assert "41 of 44 prompts answered by both versions, 40 judged pairs" in said
    assert "users: +0.050 in [-0.020, +0.120], 30 answers count as 28" in said
    assert "1 ended otherwise, candidate: other call" in said


def test_what_is_refused_is_said_by_name() -> None:
    said = shadow.lines(
        shadowed(refused="no overlap: 30 answers count as 1.2", left_out={"the gateway answered 500": 3})
    )
    assert any("users: no estimate, no overlap" in line for line in said)
    assert any("3 left out, the gateway answered 500" in line for line in said)


def test_a_rollout_in_the_shadow_counts_prompts() -> None:
    going_on = rollout("shadow").model_copy(
        update={"shadow_units": 40, "statistics": {"shadow_units": 7.0}, "shadow": None}
    )
    assert "shadow  share" in status_line(going_on, None)
    assert "7/40 prompts" in status_line(going_on, None)
    assert shadow.lines(going_on) == ["shadow  7 of 40 prompts read"]
    assert shadow.lines(rollout("canary")) == []
