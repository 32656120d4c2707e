"""Tests of reward functions: they are found, checked, or refused with a remedy, and return values become outcomes.

A return value is a score, an abstention or a failure, and never 0.0 by accident (P6).
"""

from __future__ import annotations

import sys
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_schemas import Reward, RewardResult
from headrace_scorer.functions.loading import FunctionLoader, LoadError
from headrace_scorer.functions.outcomes import outcome_of, outcome_of_error
from tests.support import packages
from tests.support.turns import START

GOOD = """
from neighbour import half

def answer(trajectory, context):
    return half

async def slow(*, feedback):
    return 1.0

def nothing():
    return None
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("half = 0.5\n")
    path = tmp_path / "rewards.py"
    path.write_text(GOOD)
    (tmp_path / "alone.py").write_text("def alone(): ...\n")
    return path


def test_functions_of_a_file_can_import_its_neighbours(rewards: Path) -> None:
    loader = FunctionLoader()
    answer, slow, nothing = loader.load([f"{rewards}:answer", f"{rewards}:slow", f"{rewards}:nothing"])
    assert (answer.source, answer.parameters, answer.asynchronous) == (
        "function:answer",
        ("trajectory", "context"),
        False,
    )
    assert (slow.asynchronous, slow.reads_feedback) == (True, True)
    assert (nothing.parameters, nothing.reads_feedback) == ((), False)
    assert loader.callables["answer"](trajectory=None, context=None) == 0.5
    (alone,) = FunctionLoader().load([f"{rewards.parent / 'alone.py'}:alone"])
    assert alone.digest == sha256((rewards.parent / "alone.py").read_bytes()).hexdigest(), "of one file its own"


def test_functions_of_a_module_on_the_path(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = rewards.parent / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from . import other\ndef score():\n    return other.value\n")
    (package / "other.py").write_text("value = 0.25\n")
    monkeypatch.syspath_prepend(str(rewards.parent))
    loader = FunctionLoader()
    (function,) = loader.load(["my_rewards.inner:score"])
    assert (function.name, loader.callables["score"]()) == ("score", 0.25)


def test_functions_behind_an_entry_point(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.install(rewards.parent / "site", "graders", {"headrace.rewards": {"graded": f"{rewards}:answer"}})
    monkeypatch.syspath_prepend(str(rewards.parent / "site"))
    (function,) = FunctionLoader().load(["graded"])
    assert function.source == "function:graded"


def test_a_successor_runs_the_text_of_its_predecessor(rewards: Path) -> None:
    first = FunctionLoader()
    first.load([f"{rewards}:answer"])
    rewards.write_text("def answer(:\n")
    second = FunctionLoader(first.sources)
    second.load([f"{rewards}:answer"])
    assert second.callables["answer"](trajectory=None, context=None) == 0.5


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("{file}:missing", "has no function 'missing'"),
        ("{folder}/nowhere.py:answer", "is not a Python file or module here"),
        ("no.such.module:answer", "No module named 'no'"),
        ("json:dumps", "parameter obj"),
        ("sys:exit", "is not a Python file or module here"),
        ("unknown_entry_point", "or a name: no installed package announces the reward function 'unknown_entry_point'"),
        ("{file}:not a name", "must be file.py:name"),
        ("{folder}/bad.py:broken", "SyntaxError"),
        ("{folder}/exits.py:answer", "SystemExit: 3"),
        ("{folder}/odd.py:wants_more", "parameter threshold"),
        ("{folder}/odd.py:takes_all", "parameter **context"),
        ("{folder}/odd.py:value", "has no function 'value'"),
        ("{folder}/odd.py:only_by_position", "parameter trajectory"),
    ],
)
def test_what_cannot_be_used_is_refused(rewards: Path, spec: str, complaint: str) -> None:
    folder = rewards.parent
    (folder / "bad.py").write_text("def broken(:\n")
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "odd.py").write_text(
        "value = 1\n"
        "def wants_more(trajectory, threshold=0.5): ...\n"
        "def takes_all(**context): ...\n"
        "def only_by_position(trajectory, /): ...\n"
    )
    with pytest.raises(LoadError) as refusal:
        FunctionLoader().load([spec.format(file=rewards, folder=folder)])
    assert complaint in str(refusal.value)


def test_two_functions_of_one_name_are_refused(rewards: Path) -> None:
    other = rewards.parent / "other.py"
    other.write_text("def answer(): ...\n")
    with pytest.raises(LoadError, match="two functions named 'answer'"):
        FunctionLoader().load([f"{rewards}:answer", f"{other}:answer"])


def entry_digest(rewards: Path) -> str:
    (function,) = FunctionLoader().load([f"{rewards}:answer"])
    return function.digest


LAYOUTS = {
    "plain": ("from helper import value", "helper.py"),
    "module": ("import helper\nvalue = helper.value", "helper.py"),
    "package": ("from parts.inner import value", "parts/inner.py"),
    "package's own": ("from parts import value", "parts/__init__.py"),
    "relative": ("from parts.outer import value", "parts/inner.py"),
    "namespace": ("from plain.inner import value", "plain/inner.py"),
    "transitive": ("from middle import value", "helper.py"),
    "inside a function": ("def late():\n    from helper import value\n    return value", "helper.py"),
    "under a condition": (
        "try:\n    import missing_module\nexcept ImportError:\n    from helper import value",
        "helper.py",
    ),
}


def lay_out(folder: Path, how: str) -> tuple[Path, Path]:
    """Write reward functions that read their value from another file, and return both files."""
    statement, named = LAYOUTS[how]
    call = "late()" if "late" in statement else "value"
    for path in ("helper.py", "parts/inner.py", "plain/inner.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("value = 0.25\n")
    (folder / "parts/__init__.py").write_text("value = 0.25\n")
    (folder / "parts/outer.py").write_text("from .inner import value\n")
    (folder / "middle.py").write_text("from helper import value\n")
    rewards = folder / "entry.py"
    rewards.write_text(f"{statement}\n\ndef answer():\n    return {call}\n")
    return rewards, folder / named


@pytest.mark.parametrize("how", LAYOUTS)
def test_a_digest_covers_what_the_function_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    rewards, other = lay_out(tmp_path, how)
    before = entry_digest(rewards)
    assert entry_digest(rewards) == before
    other.write_text("value = 0.75\n")
    assert entry_digest(rewards) != before, "the imported file changed"
    (tmp_path / "unused.py").write_text("value = 1\n")
    other.write_text("value = 0.25\n")
    assert entry_digest(rewards) == before, "no other file of the folder counts"


@pytest.mark.parametrize("change", ["edited", "broken", "deleted"])
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_file_that_changes_on_the_disk_changes_nothing_until_the_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, change: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    rewards, other = lay_out(tmp_path, how)
    first = FunctionLoader()
    (function,) = first.load([f"{rewards}:answer"])
    for path in (rewards, other):
        if change == "deleted":
            path.unlink()
        else:
            path.write_text("value = 0.75\n" if change == "edited" else "def (:\n")
    assert first.callables["answer"]() == 0.25, "late imports use the kept text"
    second = FunctionLoader(first.sources)
    (again,) = second.load([f"{rewards}:answer"])
    assert second.callables["answer"]() == 0.25, "so does a process that starts later"
    assert again.digest == function.digest


def test_a_module_that_was_not_kept_is_refused_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "hidden.py").write_text("value = 1.0\n")
    rewards = tmp_path / "entry.py"
    rewards.write_text("import importlib\ndef answer():\n    return importlib.import_module('hidden').value\n")
    loader = FunctionLoader()
    loader.load([f"{rewards}:answer"])
    with pytest.raises(ImportError, match="was not imported when the reward functions were loaded"):
        loader.callables["answer"]()


def test_data_files_that_are_read_are_named_as_not_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "table.json").write_text("[1]")
    rewards = tmp_path / "entry.py"
    rewards.write_text(
        "from pathlib import Path\ntable = (Path(__file__).parent / 'table.json').read_text()\ndef answer(): ...\n"
    )
    loader = FunctionLoader()
    loader.load([f"{rewards}:answer"])
    assert loader.modules.uncovered == (str(tmp_path / "table.json"),)


def test_two_loaders_keep_files_of_one_name_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    values: list[object] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rewards, helper = lay_out(tmp_path / name, "plain")
        helper.write_text(f"value = {len(name + 's' * len(values))}\n")
        loader = FunctionLoader()
        loader.load([f"{rewards}:answer"])
        values.append(loader.callables["answer"]())
    assert values == [3, 4]


@pytest.mark.parametrize(
    ("returned", "value"),
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (0, 0.0), (Fraction(1, 4), 0.25), (-3.0, -3.0), (Decimal("0.5"), 0.5)],
)
def test_a_number_scores(returned: Any, value: float) -> None:
    assert (outcome_of(returned).outcome, outcome_of(returned).value) == ("scored", value)


def test_criteria_score_by_their_mean_or_by_their_value() -> None:
    both = outcome_of({"correct": 1.0, "short": 0.0})
    assert (both.value, both.criteria) == (0.5, {"correct": 1.0, "short": 0.0})
    outcome = outcome_of({"correct": 1.0, "short": 0.0, "value": 0.9})
    assert (outcome.value, outcome.criteria) == (0.9, {"correct": 1.0, "short": 0.0})


def test_a_result_may_have_reasons() -> None:
    outcome = outcome_of(RewardResult(criteria={"a": 1.0, "b": 0.5}, reason="because"))
    assert (outcome.outcome, outcome.value, outcome.reason) == ("scored", 0.75, "because")


@pytest.mark.parametrize("returned", [None, RewardResult(), RewardResult(reason="no idea"), {"value": None, "a": 1}])
def test_nothing_abstains(returned: Any) -> None:
    assert (outcome_of(returned).outcome, outcome_of(returned).value) == ("abstained", None)


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"),
        float("inf"),
        "1.0",
        b"1",
        [],
        {},
        object(),
        1 + 2j,
        {"a": "good"},
        {"a": float("nan")},
        {"a": None},
        {1: 0.5},
        {"a": 1, "value": "x"},
        10**400,
        {str(n): 1.0 for n in range(65)},
        {"": 1.0},
        (0.5,),
        type("Lazy", (), {"__float__": lambda self: 1.0})(),
    ],
)
def test_anything_else_has_failed(returned: Any) -> None:
    outcome = outcome_of(returned)
    assert (outcome.outcome, outcome.value) == ("failed", None)
    assert outcome.reason


def test_every_outcome_makes_a_reward_event() -> None:
    for returned in (0.5, None, "x", {"a": 1.0}):
        outcome = outcome_of(returned)
        reward = Reward(
            time=START,
            trajectory_id="t",
            session_key="a" * 16,
            source="function:x",
            outcome=outcome.outcome,
            value=outcome.value,
            criteria=outcome.criteria,
            reason=outcome.reason,
        )
        assert reward.outcome == outcome.outcome


def test_plain_values_of_other_libraries_score() -> None:
    for number in (np.bool_(True), np.array(1), np.float32(1), Decimal(1), torch.tensor(1.0), torch.tensor(True)):
        assert (outcome_of(number).outcome, outcome_of(number).value) == ("scored", 1.0)
        assert outcome_of({"a": number, "b": number}).criteria == {"a": 1.0, "b": 1.0}
        assert outcome_of({"value": number}).value == 1.0
        assert outcome_of(RewardResult(value=number)).value == 1.0


def test_an_error_whose_text_fails_is_a_failure_that_can_be_sent() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Scalar:
        shape = ()

        def item(self) -> float:
            raise Broken

    for error in (Broken(), ValueError("bad \ud83d end\x00"), ValueError("x" * 10**6)):
        outcome = outcome_of_error(error)
        assert outcome.outcome == "failed"
        outcome.model_dump_json().encode()
    assert outcome_of(Scalar()).outcome == "failed"


def test_an_exception_says_what_and_where() -> None:
    try:
        raise ValueError("x" * 9999)
    except ValueError as error:
        outcome = outcome_of_error(error)
    assert outcome.outcome == "failed"
    assert (outcome.reason or "").startswith("ValueError: xxx")
    assert 2000 < len(outcome.reason or "") <= 4000
    assert (outcome.reason or "").endswith(".py:" + (outcome.reason or "").rpartition(":")[2])
