"""The text chart of a rollout, and its status line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_cli.commands.rollouts import status_line
from headrace_operations.rollouts import chart, shadow
from headrace_runtime import rollout_picture
from headrace_schemas.http.rollout_api import ChartPoint, RolloutState, ShadowState
from tests.unit.client.test_rollouts import rollout


def watched(points: int) -> RolloutState:
    """Return a rollout whose interval narrows around -0.2."""
    chart_points = tuple(
        ChartPoint(units=number, metrics={"reward": (-0.2, -0.2 - 2 / number, -0.2 + 2 / number)})
        for number in range(1, points + 1)
    )
    return rollout("canary").model_copy(update={"chart": chart_points})


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


def test_the_chart_without_a_reading_is_a_message() -> None:
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


def shadowed(**fields: object) -> RolloutState:
    state = {"prompts": 44, "read": 41, "pairs": 40, "spoke": 30, "tokens": 9, "effective": 28.4, "mean_weight": 1.0}
    return rollout("canary").model_copy(
        update={"shadow_units": 40, "shadow": ShadowState.model_validate({**state, **fields})}
    )


def test_shadow_results_are_printed_with_their_interval() -> None:
    state = shadowed(judged=0.1, difference=0.05, lower=-0.02, upper=0.12, ended={"candidate: other_call": 1})
    text = "\n".join(shadow.lines(state))
    assert "41 of 44 prompts answered by both versions, 40 judged pairs" in text
    assert "users: +0.050 in [-0.020, +0.120], 30 answers count as 28" in text
    assert "1 ended otherwise, candidate: other call" in text


def test_the_reason_of_a_refused_estimate_is_printed() -> None:
    lines = shadow.lines(
        shadowed(refused="no overlap: 30 answers count as 1.2", left_out={"the gateway answered 500": 3})
    )
    assert any("users: no estimate, no overlap" in line for line in lines)
    assert any("3 left out, the gateway answered 500" in line for line in lines)


def test_a_rollout_in_the_shadow_counts_prompts() -> None:
    going_on = rollout("shadow").model_copy(
        update={"shadow_units": 40, "statistics": {"shadow_units": 7.0}, "shadow": None}
    )
    assert "shadow  share" in status_line(going_on, None)
    assert "7/40 prompts" in status_line(going_on, None)
    assert shadow.lines(going_on) == ["shadow  7 of 40 prompts read"]
    assert shadow.lines(rollout("canary")) == []
