"""Tests of `make check NAME=mutants`: its injected faults and files exist, and it distinguishes detected from
undetected faults."""

from __future__ import annotations

import json
import random

import pytest

from tests.mutants import library
from tests.mutants.library import Planted, planted
from tests.mutants.program import Waiting
from tests.mutants.trial import ROOT, CoveringTests, Mutant, split, try_mutant

LIMITS = "gateway/src/headrace_gateway/access/limits.py"
TESTS = ("tests/unit/gateway/test_access.py",)


@pytest.mark.parametrize("fault", planted(), ids=lambda fault: fault.name)
def test_each_fault_can_still_be_planted(fault: Planted) -> None:
    assert fault.stale is None


def test_every_module_and_test_that_is_named_is_there() -> None:
    for group in library.groups():
        missing = [path for path in (*group.files, *group.tests) if not (ROOT / path).exists()]
        assert not missing
    assert all(survivor.reason for survivor in library.survivors())


@pytest.mark.parametrize(("old", "new", "outcome"), [("burst", "burst", "survived"), ("429", "430", "killed")])
def test_a_mutant_dies_and_the_original_lives(old: str, new: str, outcome: str) -> None:
    text = (ROOT / LIMITS).read_text(encoding="utf-8").replace(old, new)
    verdict = try_mutant(Mutant("try", LIMITS, text, TESTS), 300)
    assert verdict.outcome == outcome, verdict.output


@pytest.mark.long
@pytest.mark.parametrize("fault", random.Random(7).sample(planted(), 2), ids=lambda fault: fault.name)
def test_a_sample_of_the_planted_faults_is_noticed(fault: Planted) -> None:
    """`make check NAME=mutants` tries all injected faults."""
    verdict = try_mutant(fault.mutant(), 300)
    assert verdict.outcome == "killed", verdict.output


def test_a_worker_is_given_mutants_of_its_own_place_alone() -> None:
    """Another worker may have taken the last mutant between two checks."""
    mutants = [Mutant(str(number), file, "", TESTS) for number, file in enumerate(("a.py", "a.py", "b.py"))]
    waiting = Waiting(mutants)
    assert waiting.take() == mutants[0]
    assert waiting.take(("b.py", TESTS)) is None
    assert waiting.take(mutants[0].target) == mutants[1]
    assert waiting.take(mutants[0].target) is None
    assert len(waiting) == 1
    assert (waiting.take(), waiting.take()) == (mutants[2], None)


def test_a_file_is_overlaid_with_its_whole_import_package() -> None:
    package, inside = split("services/inference/src/headrace_inference/chat/plain.py")
    assert (package.name, str(inside)) == ("headrace_inference", "chat/plain.py")


def test_tests_that_run_a_changed_statement_come_first_the_shortest_before() -> None:
    text = "def f(x):\n    if x:\n        return (\n            1\n        )\n    return 2\n"
    recorded = json.dumps({"slow": (2.0, [1, 2, 3, 4]), "fast": (1.0, [1, 2, 4]), "other": (0.1, [1, 2, 6])})
    by_line = CoveringTests(text, recorded)
    assert by_line.covering(text.replace("            1", "            3")) == ["fast", "slow"]
    assert by_line.covering(text.replace("return 2", "return 3")) == ["other"]
    assert by_line.covering(text.replace("if x", "if not x")) == ["other", "fast", "slow"]
    assert by_line.covering(text) == []
    assert by_line.covering("X = 1\n" + text) == ["other", "fast", "slow"]
