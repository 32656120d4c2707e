"""Tests of one contract for all learners: the back end `torch`, and the learner of the simulation.

Faulty learners that break one promise each must fail it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.backends import BACKENDS, Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import GRADIENT_FACTOR, Abilities, Frozen, Learner, StepResult, WholeCopy
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import TORCH
from headrace_trainer.torch_learner.learner import TorchLearner
from tests.contract.learner import promises
from tests.contract.learner.promises import PROMISES, Opener, Promise
from tests.docs.fences import ROOT, fences
from tests.simulation import services
from tests.simulation.services import RememberingLearner
from tests.support import tiny_model


class ForgetsTheOptimizer(RememberingLearner):
    """Faulty learner that restores the weights without the optimizer."""

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        super().thaw(frozen, with_random=with_random)
        self.updates = 0


class KeepsMomentum(RememberingLearner):
    """Faulty learner that keeps its momentum after it has loaded another version's weights."""

    def load(self, folder: Path) -> None:
        updates = self.updates
        super().load(folder)
        self.updates = updates


class Nameless(RememberingLearner):
    """Faulty learner whose lineages share blobs of equal weights, so that one lineage deletes the blobs of another."""

    def __init__(self, _lineage: str) -> None:
        super().__init__("any")


class LooksAfterwards(RememberingLearner):
    """Faulty learner that detects a non-finite gradient only after the update."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if len(batch.rows) == 3:
            self.updates += 1
        return super().step(batch, stop, from_base=from_base)


class AlwaysMoves(RememberingLearner):
    """Faulty learner that reports that a step moved the weights when it did not."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return replace(super().step(batch, stop, from_base=from_base), moved=True)


class Deaf(RememberingLearner):
    """Faulty learner that ignores a stop request."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return super().step(batch, threading.Event(), from_base=from_base)


class PassesOverCorrections(RememberingLearner):
    """Faulty learner that trains only new rows and ignores corrections."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        return super().step(Batch(batch.first_rows or batch.rows, batch.full_rows), stop, from_base=from_base)


class Unmeasured(RememberingLearner):
    """Faulty learner that omits the factor of a token's gradient."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        outcome = super().step(batch, stop, from_base=from_base)
        return StepResult({name: value for name, value in outcome.measured.items() if name != GRADIENT_FACTOR})


class Random(RememberingLearner):
    """Faulty learner that returns another state at each call."""

    def freeze(self) -> Frozen:
        frozen = super().freeze()
        return Frozen(frozen.weights, frozen.optimizer + secrets.token_bytes(4))


class ReportsBaseFingerprint(RememberingLearner):
    """Faulty learner that returns the base's fingerprint for each version."""

    def write(self, folder: Path, base: str) -> Fingerprint:
        super().write(folder, base)
        return self.fingerprint_of_base()


class WritesMore(RememberingLearner):
    """Faulty learner that writes a configuration next to the weights, which would replace the base's."""

    def write(self, folder: Path, base: str) -> Fingerprint:
        (folder / "config.json").write_text("{}")
        return super().write(folder, base)


class GrowsVocabulary(RememberingLearner):
    """Faulty learner that reports a larger vocabulary after each update."""

    @property
    def abilities(self) -> Abilities:
        abilities = super().abilities
        return Abilities(abilities.kind, abilities.vocabulary + self.updates, abilities.context)


class RandomWeights(RememberingLearner):
    """Faulty learner that trains other weights at each call."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        outcome = super().step(batch, stop, from_base=from_base)
        last = self.lessons[-1].model_copy(update={"tokens_sha256": secrets.token_hex(32)})
        self.lessons = (*self.lessons[:-1], last)
        return outcome


class Stays(RememberingLearner):
    """Faulty learner that restores the state only at its start."""

    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        if with_random:
            super().thaw(frozen, with_random=True)


class CopiesLate(RememberingLearner):
    """Faulty learner that reads the state when a copy is written, not when it is taken."""

    def copy(self, base: str | None) -> WholeCopy:
        learner, copied = self, super().copy(base)

        class Late(WholeCopy):
            def write(self, folder: Path, on_weights: Callable[[], None] | None = None) -> None:
                WholeCopy(learner.freeze(), copied.fingerprint, copied.version).write(folder, on_weights)

        return Late(copied.frozen, copied.fingerprint, copied.version)


class ClosesOnce(RememberingLearner):
    """Faulty learner whose second `close` fails, as after a failure and a clean end."""

    def close(self) -> None:
        del self.lessons


FAULTS: tuple[tuple[type[RememberingLearner], Promise], ...] = (
    (GrowsVocabulary, promises.it_says_what_it_can_be_given),
    (Unmeasured, promises.a_step_changes_the_weights_and_is_measured),
    (PassesOverCorrections, promises.corrections_are_trained),
    (RandomWeights, promises.equal_calls_make_equal_weights),
    (Random, promises.freezing_changes_nothing),
    (ForgetsTheOptimizer, promises.another_process_goes_on_as_if_nothing_had_happened),
    (Stays, promises.it_goes_back),
    (CopiesLate, promises.a_copy_is_of_its_moment),
    (Nameless, promises.lineages_share_no_blob),
    (LooksAfterwards, promises.what_is_not_finite_changes_nothing),
    (AlwaysMoves, promises.a_step_reports_whether_it_moved_the_weights),
    (Deaf, promises.a_step_that_is_told_to_stop_is_abandoned),
    (ReportsBaseFingerprint, promises.a_version_is_what_was_trained),
    (WritesMore, promises.a_version_holds_weights_alone),
    (KeepsMomentum, promises.loading_forgets_all_momentum),
    (ReportsBaseFingerprint, promises.the_base_answers_as_the_base),
    (ClosesOnce, promises.it_may_be_closed_twice),
)
"""Faults, and the promise that finds each."""


Folder = Callable[[], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that builds the tiny model on first use and returns its folder."""
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
    promise(opener(services.BACKEND, services.BASE), tmp_path)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_one_of_the_page(promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example learner of `docs/add/backend.md` keeps all promises."""
    (source,) = (fence.text for fence in fences(ROOT / "docs/add/backend.md") if fence.file == "tally.py")
    (tmp_path / "tally.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tally", raising=False)
    module = importlib.import_module("tally")
    (folder := tmp_path / "files").mkdir()
    promise(Opener(services.BASE, lambda lineage: module.Tally(lineage, 0.5)), folder)


@pytest.mark.parametrize(("fault", "promise"), FAULTS, ids=lambda parameter: parameter.__name__)
def test_a_planted_fault_is_found(fault: type[services.RememberingLearner], promise: Promise, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, AttributeError, pytest.fail.Exception)):
        promise(Opener(services.BASE, fault), tmp_path)


def test_each_promise_is_seen_to_fail() -> None:
    assert {promise for _, promise in FAULTS} == set(PROMISES)


@pytest.mark.parametrize("kind", [TorchLearner, services.RememberingLearner])
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
    """mypy checks each learner against the protocol where its back end opens it; this learner lacks `failure`."""
    source = Path(services.__file__).read_text(encoding="utf-8")
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
