"""A job that is killed in each of its parts writes the bytes of an undisturbed one (short `make check NAME=jobs`)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_runtime.registries import Registry
from tests.jobs.killing import (
    Workplace,
    case_of,
    differences,
    killed,
    manifests,
    moments,
    set_aside,
    to_the_end,
    written,
)
from tests.support import tiny_model
from tests.support.seeds import draw_seed

pytestmark = [pytest.mark.own_target, pytest.mark.timeout(1800)]
ANNOUNCED = Registry("algorithms", object, "algorithm").names()


def test_a_killed_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    case = case_of(300, seed)
    base, rows = tiny_model.build(tmp_path / "base", layers=1), written(case, tmp_path / "rows.jsonl")
    disturbed = Workplace(tmp_path / "work", base, rows)
    journal = to_the_end(case, disturbed)
    assert journal.trained == 300
    quiet = set_aside(disturbed, tmp_path / "quiet")
    log = killed(case, disturbed, moments(draw, 5, len(manifests(quiet))), draw)
    assert sum(kill["killed"] for kill in log) >= 4, log
    assert differences(quiet, disturbed) == [], log
    assert to_the_end(case, disturbed).version == journal.version, "a job that is done says so again"


def test_a_planted_difference_is_noticed(tmp_path: Path) -> None:
    seed = 1
    case, other = case_of(70, seed), case_of(70, seed + 1)
    base = tiny_model.build(tmp_path / "base", layers=1)
    work = Workplace(tmp_path / "work", base, written(case, tmp_path / "rows.jsonl"))
    to_the_end(case, work)
    first = set_aside(work, tmp_path / "one")
    to_the_end(other, replace(work, rows=written(other, tmp_path / "others.jsonl")))
    assert any("version" in line for line in differences(first, work))
