"""Reward functions are found, checked, and refused with a sentence that says what to change."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from headrace_scorer.functions.loading import FunctionLoader, LoadError
from tests.support import plugins

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
    return path


def test_functions_of_a_file_can_import_its_neighbours(rewards: Path) -> None:
    loader = FunctionLoader()
    answer, slow, nothing = loader.load([f"{rewards}:answer", f"{rewards}:slow", f"{rewards}:nothing"])
    assert (answer.source, answer.parameters, answer.asynchronous) == (
        "function:answer",
        ("trajectory", "context"),
        False,
    )
    assert (slow.asynchronous, slow.looks_at_feedback) == (True, True)
    assert (nothing.parameters, nothing.looks_at_feedback) == ((), False)
    assert loader.callables["answer"](trajectory=None, context=None) == 0.5
    assert answer.digest == sha256(GOOD.encode()).hexdigest()


def test_functions_of_a_module_on_the_path(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = rewards.parent / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from . import other\ndef score():\n    return other.value\n")
    (package / "other.py").write_text("value = 0.25\n")
    monkeypatch.syspath_prepend(str(rewards.parent))
    loader = FunctionLoader()
    (found,) = loader.load(["my_rewards.inner:score"])
    assert (found.name, loader.callables["score"]()) == ("score", 0.25)


def test_functions_behind_an_entry_point(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.install(rewards.parent / "site", "graders", {"headrace.rewards": {"graded": f"{rewards}:answer"}})
    monkeypatch.syspath_prepend(str(rewards.parent / "site"))
    (found,) = FunctionLoader().load(["graded"])
    assert found.source == "function:graded"


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
