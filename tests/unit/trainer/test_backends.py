"""Tests of back ends, of a lineage whose learner dies, and of base folders with odd values."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.registries import PluginError
from headrace_runtime.settings.sections import Common, load
from headrace_runtime.storage.model_folder import find_folder_problems, stored_tensors
from headrace_schemas import Checkpoint
from headrace_trainer.backends import Backend
from headrace_trainer.batches.batch import Batch
from headrace_trainer.check import check, suggest
from headrace_trainer.learner import Learner, LearnerLost, StepResult
from headrace_trainer.lineage import opening
from headrace_trainer.lineage.versions import check_base
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trainer import Trainer
from tests.simulation import services
from tests.support import packages
from tests.unit.trainer.world import World, experience

FOREIGN = """
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.losses import Loss
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.backends import Backend
from tests.simulation.services import BACKEND

class Depth(Section):
    depth: int = 2

PLAIN = BACKEND
DEEP = Backend(BACKEND.open, offers=Needs(reference=True, critic=True), adapters=True, settings=Depth)
PPO = Algorithm("reinforce++", "valued")
VALUED = Loss(lambda: None, Needs(critic=True))
"""
ANNOUNCED = {
    "headrace.trainer_backends": {"plain": "backs:PLAIN", "deep": "backs:DEEP"},
    "headrace.algorithms": {"with-critic": "backs:PPO"},
    "headrace.losses": {"valued": "backs:VALUED"},
}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package `backs` with two back ends, an algorithm that needs a critic, and an invalid entry point."""
    packages.install(tmp_path / "site", "backs", ANNOUNCED, backs=FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "backs", raising=False)


def settings_of(folder: Path, text: str) -> TrainerSettings:
    path = folder / "headrace.toml"
    path.write_text(f'[trainer]\nbase = "{services.BASE}"\n{text}\n', encoding="utf-8")
    return load("trainer", TrainerSettings, path, {})[1]


def test_an_unknown_back_end_stops_the_start_with_those_there_are(tmp_path: Path) -> None:
    message = (
        r"trainer\.backend = 'torhc': .* trainer back end 'torhc'; did you mean 'torch'\? there are ray, torch, trinity"
    )
    with pytest.raises(SettingError, match=message):
        settings_of(tmp_path, 'backend = "torhc"')


def test_what_is_no_back_end_is_refused_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announces = {"headrace.trainer_backends": {"broken": "broken:not_one"}}
    packages.install(tmp_path / "site", "broken", announces, broken="not_one = 3")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    message = r"broken 1\.0 announces broken:not_one as the trainer back end 'broken'; it has to be a .*Backend"
    with pytest.raises(PluginError, match=message):
        settings_of(tmp_path, 'backend = "torch"')


@pytest.mark.usefixtures("foreign")
def test_what_a_back_end_offers_is_compared_with_what_is_asked(tmp_path: Path) -> None:
    for text, message in (
        (
            'algorithm = "with-critic"',
            r"trainer\.algorithm = 'with-critic': .* need critic, which the back end plain does not have",
        ),
        ("loss.kl = 0.1", r"trainer\.backend = 'plain': cannot compute logprobs of the base"),
        ("health.kl_base_interval_steps = 5", r"trainer\.backend = 'plain': cannot compute logprobs of the base"),
        ("lora.rank = 4", r"trainer\.lora\.rank = 4: the back end plain trains no adapters"),
    ):
        with pytest.raises(SettingError, match=message):
            settings_of(tmp_path, f'backend = "plain"\n{text}')
        settings_of(tmp_path, f'backend = "deep"\n{text}')


@pytest.mark.usefixtures("foreign")
def test_a_back_end_has_a_section_of_its_own(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'backend = "deep"\n[trainer.deep]\ndepth = 3')
    assert settings.of("deep").model_dump() == {"depth": 3}
    with pytest.raises(SettingError, match=r"trainer\.deep\.dept = 3: unknown; did you mean 'depth'"):
        settings_of(tmp_path, "deep.dept = 3")


async def test_the_check_before_a_start_is_the_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[TrainerSettings] = []
    monkeypatch.setattr("headrace_trainer.check._problems", lambda _: iter(()))
    settings = TrainerSettings(base=str(services.BASE))
    with as_torch(Backend(services.BACKEND.open, check=checked.append)):
        assert await check(mock.Mock(), settings) == []
    assert checked == [settings]
    with as_torch(services.BACKEND):
        assert await check(mock.Mock(), settings) == []


@dataclass
class Fragile:
    """Back end that records its learners. The first learner dies as `how` describes."""

    how: Callable[[MortalLearner], None] | None
    opened: list[MortalLearner] = field(default_factory=list)

    def open(self, _folder: Path, settings: TrainerSettings) -> Learner:
        self.opened.append(MortalLearner(settings.lineage, self.how if not self.opened else None))
        return self.opened[-1]


class MortalLearner(services.RememberingLearner):
    """Learner that can die during a step or after it."""

    def __init__(self, lineage: str, how: Callable[[MortalLearner], None] | None) -> None:
        super().__init__(lineage)
        self._how = how
        self.why: str | None = None
        self.closed = 0

    @property
    def failure(self) -> str | None:
        return self.why

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        result = super().step(batch, stop, from_base=from_base)
        if self._how is not None and self.updates == 2:
            self._how(self)
        return result

    def close(self) -> None:
        self.closed += 1


def in_the_step(learner: MortalLearner) -> None:
    learner.why = "rank 1 was killed"
    raise LearnerLost(learner.why)


def after_the_step(learner: MortalLearner) -> None:
    learner.why = "rank 1 was killed"


def as_torch(backend: Backend) -> Any:
    return mock.patch("headrace_trainer.torch_learner.TORCH", backend)


def settings(**more: Any) -> TrainerSettings:
    small = {"batch_experiences": 4, "batch_experiences_min": 1, "save_interval_s": 1e9, "max_staleness": 9}
    table = {"base": str(services.BASE), "model": "m", "steps_per_version": 3, **small, **more}
    return TrainerSettings.model_validate(table)


def lessons(trainer: Trainer) -> list[tuple[int, str]]:
    assert trainer.lineage is not None
    assert isinstance(trainer.lineage.learner, services.RememberingLearner)
    return [(lesson.step, lesson.experience_id) for lesson in trainer.lineage.learner.lessons]


@pytest.mark.parametrize("how", [in_the_step, after_the_step])
async def test_a_learner_that_dies_ends_the_process_and_the_next_one_trains_each_experience_once(
    tmp_path: Path, how: Callable[[MortalLearner], None]
) -> None:
    async def tell(folder: Path, fragile: Fragile) -> tuple[list[tuple[int, str]], World]:
        world = World(folder)
        with as_torch(Backend(fragile.open)):
            lineage = opening.open_lineage(settings(), world.blobs, world.clock)
            version = lineage.state.history.head
            fragile.opened.clear()
            world.bus.produce(*(experience(n, version, reward=n % 2) for n in range(12)))
            if fragile.how is not None:
                with pytest.raises(LearnerLost, match="rank 1 was killed"):
                    await world.trainer(settings()).run()
            return lessons(await world.run(settings())), world

    fragile = Fragile(how)
    calm, _ = await tell(tmp_path / "calm", Fragile(None))
    result, world = await tell(tmp_path / "told", fragile)
    assert result == calm
    assert len(result) == 12
    assert set(world.bus.fates.values()) == {"trained"}
    assert [opened_learner.closed for opened_learner in fragile.opened] == [1, 1]


async def test_a_failure_is_said_and_ends_the_process_while_nothing_is_trained(tmp_path: Path) -> None:
    world, fragile = World(tmp_path), Fragile(None)
    trainer = world.trainer(settings())
    polled = world.source.poll

    async def dies(experiences_max: int) -> Any:
        fragile.opened[0].why = "rank 1 was killed"
        assert trainer.learner_failure == "rank 1 was killed"
        return await polled(experiences_max)

    assert trainer.learner_failure is None, "there is none yet"
    expected_error = pytest.raises(LearnerLost, match="lineage main has lost its weights: rank 1 was killed")
    with as_torch(Backend(fragile.open)), mock.patch.object(world.source, "poll", dies), expected_error:
        await trainer.run()
    assert fragile.opened[0].closed == 1


async def test_a_learner_is_closed_when_its_lineage_does_not_open(tmp_path: Path) -> None:
    world, fragile = World(tmp_path), Fragile(None)
    broken = mock.patch.object(opening, "_restore_state", side_effect=ZeroDivisionError)
    with as_torch(Backend(fragile.open)), broken, pytest.raises(ZeroDivisionError):
        opening.open_lineage(settings(), world.blobs, world.clock)
    assert [opened_learner.closed for opened_learner in fragile.opened] == [1]


@pytest.mark.usefixtures("foreign")
async def test_a_lineage_is_trained_by_a_back_end_that_somebody_else_wrote(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.run(settings(backend="plain", steps_per_version=1))
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version, reward=n % 2) for n in range(8)))
    trainer = await world.run(settings(backend="plain", steps_per_version=1))
    assert lessons(trainer) == [(1 + n // 4, f"e{n}") for n in range(8)]
    checkpoint: Checkpoint = world.bus.checkpoints[-1]
    assert checkpoint.step == 2


ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "\x1b[31m",
    [],
    [1],
    {},
    {"a": 1},
]
SIZES = ("num_hidden_layers", "hidden_size", "head_dim", "num_key_value_heads", "max_position_embeddings", "vocab_size")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "base")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def write_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))


@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes_in_a_configuration_are_no_error(name: str, folder: Path) -> None:
    for value in ODD_VALUES:
        change(folder / "config.json", **{name: value})
        list(find_folder_problems(folder))
        suggest(Common(), TrainerSettings.model_validate({"base": str(folder)}))


def test_odd_tokens_and_shards_are_no_error(folder: Path) -> None:
    for value in [*ODD_VALUES, [{"content": ["a"], "id": 3}], [{"content": "a", "id": 10**30}]]:
        change(folder / "tokenizer.json", added_tokens=value)
        list(find_folder_problems(folder))
    index = folder / "model.safetensors.index.json"
    for value in [*ODD_VALUES, {"a": [1], "b": 2, "c": "x"}, {"a": "\x00"}, {"a": "y" * 5000}]:
        index.write_text(json.dumps({"weight_map": value}), encoding="utf-8")
        list(find_folder_problems(folder))


@pytest.mark.parametrize("shape", [["2"], [-1], [1.5], [True], [2**60], [None], 7, None])
@pytest.mark.parametrize("offsets", [[0, 8]])
def test_a_tensor_of_an_odd_shape_is_named(shape: Any, offsets: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    write_header(path, json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode())
    with pytest.raises(ValueError, match="its header is not valid"):
        stored_tensors(path)
    assert any("its header is not valid" in problem for problem in find_folder_problems(folder))
    assert suggest(Common(), TrainerSettings.model_validate({"base": str(folder)})) == {}


@pytest.mark.parametrize("offsets", [[-8, 8], [0], ["0", "8"], [0.5, 8], None])
def test_a_tensor_at_an_odd_position_is_named(offsets: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    write_header(path, json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode())
    assert any("its header is not valid" in problem for problem in find_folder_problems(folder))


def test_a_header_that_is_nested_too_deeply_is_named(folder: Path) -> None:
    write_header(folder / "model.safetensors", b"[" * 100_000)
    assert any("nested too deeply" in problem for problem in find_folder_problems(folder))


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def device(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to("/dev/zero")


def link_outside(folder: Path) -> None:
    secret = folder.parent / "id_ed25519"
    secret.write_text("a private key", encoding="utf-8")
    (folder / "notes.txt").symlink_to(secret)


def dangling_weights(folder: Path) -> None:
    (folder / "model-2.safetensors").symlink_to(folder / "nowhere")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (pipe, "config.json is not a file"),
        (device, "generation_config.json is not a file"),
        (link_outside, "notes.txt is a link to a file outside of the folder"),
        (dangling_weights, "model-2.safetensors is not a file"),
    ],
)
async def test_a_file_that_is_none_of_the_folder_is_named_and_not_read(
    damage: Callable[[Path], None], problem: str, folder: Path
) -> None:
    damage(folder)
    messages = await check(Common(), TrainerSettings.model_validate({"base": str(folder)}))
    assert len(messages) == 1
    assert problem in messages[0]
    with pytest.raises(SettingError, match=problem):
        check_base(folder)


def test_links_of_a_hub_s_cache_and_links_to_weights_are_files(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert list(find_folder_problems(snapshot)) == []
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    assert list(find_folder_problems(folder)) == []


async def test_a_tokenizer_that_ends_its_library_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    change(path, model=model | {"continuing_subword_prefix": "\x00\x1b[31m"})
    messages = await check(Common(), TrainerSettings.model_validate({"base": str(folder)}))
    assert any("tokenizer.json cannot be used" in message for message in messages)
