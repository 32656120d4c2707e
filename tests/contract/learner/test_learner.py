"""One contract for every owner of weights and optimizer: the back end `torch`, and the simulation's learner."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_trainer.backends import BACKENDS, Backend
from headrace_trainer.learner import Learner
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.backend import TORCH
from headrace_trainer.torch_learner.learner import TorchLearner
from tests.contract.learner.planted import FAULTS
from tests.contract.learner.promises import PROMISES, Opener, Promise
from tests.docs.fences import ROOT, fences
from tests.simulation import learner as simulated
from tests.support import tiny_model

Folder = Callable[[], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny model's folder, built on first use."""
    folders: list[Path] = []

    def create() -> Path:
        if not folders:
            folders.append(tiny_model.build(tmp_path_factory.mktemp("learner") / "base", layers=1))
        return folders[0]

    return create


def opener(backend: Backend, base: Path, **settings: Any) -> Opener:
    def open_one(lineage: str) -> Learner:
        table = {"base": str(base), "lineage": lineage, "optimizer": {"learning_rate": 1e-2}, **settings}
        return backend.open(base, TrainerSettings.model_validate(table))

    return Opener(base, open_one)


TORCHES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": {"learning_rate": 1e-2, "kind": "muon"}},
    "adapters": {"lora": {"rank": 4}},
    "two updates and the base": {"loss": {"updates_per_step": 2, "kl": 0.01}},
    "padded": {"compute": {"packing": "padded"}},
    "critic": {"algorithm": "ppo"},
    "sequences": {"loss": {"agg_mode": "seq-mean-token-mean"}},
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("name", TORCHES)
def test_torch(promise: Promise, name: str, tiny: Folder, tmp_path: Path) -> None:
    promise(opener(TORCH, tiny(), **{"native": {"tokens": 0}, **TORCHES[name]}), tmp_path)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_simulations_learner(promise: Promise, tmp_path: Path) -> None:
    promise(opener(simulated.BACKEND, simulated.BASE), tmp_path)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_one_of_the_page(promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/add/backend.md` shows a learner that keeps all of it."""
    (source,) = (fence.text for fence in fences(ROOT / "docs/add/backend.md") if fence.file == "tally.py")
    (tmp_path / "tally.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tally", raising=False)
    module = importlib.import_module("tally")
    (folder := tmp_path / "files").mkdir()
    promise(Opener(simulated.BASE, lambda lineage: module.Tally(lineage, 0.5)), folder)


@pytest.mark.parametrize(("fault", "promise"), FAULTS, ids=lambda parameter: parameter.__name__)
def test_a_planted_fault_is_found(fault: type[simulated.RememberingLearner], promise: Promise, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, AttributeError, pytest.fail.Exception)):
        promise(Opener(simulated.BASE, fault), tmp_path)


def test_each_promise_is_seen_to_fail() -> None:
    assert {promise for _, promise in FAULTS} == set(PROMISES)


@pytest.mark.parametrize("kind", [TorchLearner, simulated.RememberingLearner])
def test_a_learner_has_every_member_of_the_protocol(kind: type[Any]) -> None:
    members = {name: member for name, member in vars(Learner).items() if not name.startswith("_")}
    assert len(members) > 8
    for name, member in members.items():
        implemented = getattr(kind, name)
        assert isinstance(implemented, property) == isinstance(member, property), name
        if not isinstance(member, property):
            assert list(inspect.signature(implemented).parameters) == list(inspect.signature(member).parameters), name


@pytest.mark.long
def test_a_missing_member_is_found_where_it_is_written(tmp_path: Path) -> None:
    """mypy holds each learner to the protocol where its back end opens it; here one lacks `failure`."""
    source = Path(simulated.__file__).read_text(encoding="utf-8")
    broken, count = re.subn(r"    @property\n    def failure\(self\).*?return None\n\n", "", source, flags=re.DOTALL)
    assert count == 1
    (tmp_path / "broken.py").write_text(broken, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "broken.py")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "RememberingLearner" in process.stdout
    assert "failure" in process.stdout


def test_the_registry_knows_torch_and_loads_nothing_for_its_name() -> None:
    assert "torch" in BACKENDS.names()
    code = (
        "import sys; from headrace_trainer.settings import TrainerSettings; TrainerSettings(base='x');"
        "import headrace_trainer.lineage.opening;"
        "print(sorted({'torch', 'transformers', 'peft', 'safetensors'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.strip() == "[]", f"a lineage without a learner imports {process.stdout}{process.stderr}"
