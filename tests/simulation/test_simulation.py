"""A few seeds of `make check NAME=simulate` in every test run, and planted bugs that the checkers must find."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED
from tests.simulation.program import summary
from tests.simulation.promises import PROMISES
from tests.simulation.run import simulate

ROOT = Path(__file__).resolve().parents[2]
CATCH_WITHIN = 36
"""Seeds; most are caught by the first few."""
THERE_AND_BACK = 43
"""Weights go back with a refusal and come forward with the next version's promotion."""
KNOWN = {
    "weights come forward unsaid": 29,
    "commit before effect": 2,
    "ends do not wait": 3,
    "outbox in memory": 10,
    "past the spool": 4,
}
"""Seeds that meet rare bugs. Seeds after them serve when the simulation has changed."""


@pytest.fixture(scope="module", autouse=True)
def _others_are_no_garbage() -> None:
    """Freeze the objects of other tests, so that the collection at the end of a run need not scan them. They stay
    frozen,
    because unfreezing would include imported modules.
    """
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("seed", [*range(5), THERE_AND_BACK])
def test_every_promise_is_kept(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.broken == (), outcome.command
    assert outcome.checks.keys() == PROMISES.keys()
    assert all(outcome.checks[name] for name in ("p1_captured", "p2_tokens", "p4_once", "p5_staleness", "account"))


SLOW = {"outbox in memory", "offsets outside the checkpoint", "weights go back unsaid", "ends do not wait"}
"""Seen after several seeds only."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in PLANTED])
def test_a_planted_bug_is_caught(name: str) -> None:
    planted = PLANTED[name]
    for seed in dict.fromkeys((KNOWN.get(name, 0), *range(CATCH_WITHIN))):
        with planted.plant():
            broken = {text.partition(":")[0] for text in simulate(seed).broken}
        if broken & planted.breaks:
            return
    pytest.fail(f"{CATCH_WITHIN} seeds did not show it")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_one_seed_is_one_run_whatever_the_process() -> None:
    """Fresh or after other seeds, in any order of sets. The digest covers each record, commit, death and fault."""
    outcome = simulate(3)
    assert simulate(4).digest != outcome.digest
    program = "from tests.simulation.run import simulate; print(simulate(3).digest)"
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == outcome.digest


def test_a_failure_says_how_to_see_it_again() -> None:
    with PLANTED["abstaining is zero"].plant():
        outcome = simulate(0, verbose=True)
    report = json.loads(json.dumps(summary([outcome], 0, 1.0)))
    assert report["failed"][0]["command"] == "python -m tests.system simulation --seeds 1 --first 0 --verbose"
    assert report["failed"][0]["broken"]
    assert any(" fault " in line for line in outcome.story)
