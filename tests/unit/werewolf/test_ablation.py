"""The rules are such that each of the three abilities matters, and none is enough alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from werewolf import ablation, policies
from werewolf.ablation import WinRate, lines

GAMES, SEED = 1000, 7


def failing(found: dict[tuple[str, ...], WinRate]) -> list[str]:
    return [str(line["name"]) for line in lines(found) if not line["holds"]]


def test_no_ability_is_enough_and_none_can_be_missed() -> None:
    found = ablation.ablation(GAMES, SEED)
    assert 0.45 < found[()].low < found[()].high < 0.58, "where the base begins"
    assert [name for name, rate in found.items() if rate.low > ablation.WIN_RATE] == [
        ("hide", "blame"), ("hide", "vote"), ("hide", "blame", "vote")
    ]  # fmt: skip
    assert failing(found) == []


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("honest", 0.0, ["ablation: all but hide"]),
        ("votes_suspect", 0.0, ["ablation: all but blame"]),
    ],
    ids=["nobody ever gives itself away", "villagers do not listen to suspicions"],
)
def test_rules_under_which_an_ability_is_worth_nothing_are_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, fails: list[str]
) -> None:
    monkeypatch.setattr(policies.play, "__defaults__", (replace(policies.HABITS, **{name: value}),))
    assert set(fails) <= set(failing(ablation.ablation(GAMES, SEED)))


def test_an_interval_by_hand() -> None:
    rate = WinRate(0.5, 400)
    assert rate.margin == pytest.approx(1.96 * 0.025)
    assert str(rate) == "50.0% ± 4.9%"


def test_it_prints_lines_for_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablation", "--lines", "--games", "300"])
    ablation.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 7
    assert all(one.keys() == {"name", "wanted", "found", "holds"} for one in found)
