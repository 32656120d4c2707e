"""Cohen's kappa with quadratic weights, against values worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_judge import agreement
from headrace_judge.agreement import confusion, quadratic_kappa

# Ten runs: eight agree; a human 1 was judged 2, and a human 5 was judged 3.
PAIRS = [(1, 1), (1, 1), (1, 2), (2, 2), (3, 3), (3, 3), (4, 4), (5, 5), (5, 5), (5, 3)]


def test_the_table_has_humans_in_rows() -> None:
    assert confusion(PAIRS) == [[2, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 2]]


def test_kappa_by_hand() -> None:
    """Seen: (1 + 4) / 10 = 0.5. Chance: human counts 3 1 2 1 3, judge's 2 2 3 1 2; the sum of (i-j)^2 over all 100
    combinations is 3*(0+2+12+9+32) + 1*(2+0+3+4+18) + 2*(8+2+0+1+8) + 1*(18+8+3+0+2) + 3*(32+18+12+1+0)
    = 165 + 27 + 38 + 31 + 189 = 450, so 4.5. Kappa = 1 - 0.5 / 4.5 = 8/9."""
    assert quadratic_kappa(confusion(PAIRS)) == pytest.approx(8 / 9)


@pytest.mark.parametrize(
    ("table", "kappa"),
    [
        ([[5, 0], [0, 5]], 1.0),
        ([[0, 5], [5, 0]], -1.0),
        ([[20, 5], [10, 15]], 0.4),  # the textbook's 2 x 2 example: observed 0.7, by chance 0.5
        ([[4, 4], [4, 4]], 0.0),
        ([[7, 0], [0, 0]], None),
        ([[0, 0], [0, 0]], None),
    ],
)
def test_known_tables(table: list[list[int]], kappa: float | None) -> None:
    assert quadratic_kappa(table) == (None if kappa is None else pytest.approx(kappa))


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_command_prints_kappa_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"human": human, "judge": judge, "run": "ignored"} for human, judge in PAIRS]
    assert agreement.main([str(write(tmp_path / "scores.jsonl", *lines, {"human": 2, "judge": None}, ""))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "all: kappa 0.889, 10 scored, 8 equal, 1 abstained",
        "human \\ judge    1    2    3    4    5",
        "            1    2    1    0    0    0",
        "            2    0    1    0    0    0",
        "            3    0    0    2    0    0",
        "            4    0    0    0    1    0",
        "            5    0    0    1    0    2",
    ]


def test_criteria_are_reported_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "scores.jsonl",
        {"criterion": "a", "human": 1, "judge": 1},
        {"criterion": "b", "human": 1, "judge": 5},
        {"criterion": "a", "human": 5, "judge": 5},
    )
    assert agreement.main([str(path)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if "kappa" in line]
    assert heads == [
        "a: kappa 1.000, 2 scored, 2 equal, 0 abstained",
        "b: kappa 0.000, 1 scored, 0 equal, 0 abstained",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"human": 6, "judge": 1}', ":1: human: Input should be less than or equal to 5"),
        ('{"human": 4.5, "judge": 1}', ":1: human: Input should be a valid integer"),
        ('{"human": 4}', ":1: judge: Field required"),
        ("nonsense", ":1: the line: Invalid JSON"),
        ("", "the file has no scores"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert agreement.main([str(write(tmp_path / "scores.jsonl", line))]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement.main(["/does/not/exist"]) == 2
    assert "/does/not/exist" in capsys.readouterr().err
