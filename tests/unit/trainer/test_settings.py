"""Tests of trainer settings, of the check of base folders, and of short trainings.

Settings that cannot work prevent the start and name the setting to change (P11). The settings of the back end `ray`
load without ray. The check of a base folder runs without torch. A short training reads a recording and writes a version
of a temporary lineage.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common, complete, load
from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint, Experience
from headrace_schemas.programs import ShortRun
from headrace_trainer.backends import BACKENDS
from headrace_trainer.check import check
from headrace_trainer.lineage.versions import weight_digests
from headrace_trainer.ray_learner import RaySettings, cluster
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.short_training import ShortTraining
from tests.support import tiny_model
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import experience


def read(tmp_path: Path, text: str) -> TrainerSettings:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return load("trainer", TrainerSettings, path, {})[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", r"trainer\.base = '': name a folder, or a model of the hub"),
        ("group_size = 1\nadvantage.kind = 'grpo'", r"trainer\.group_size = 1: grpo compares runs .* rolling baseline"),
        ("group_size = 1\nadvantage.kind = 'rloo'", r"trainer\.group_size = 1: rloo compares runs"),
        ("batch_experiences = 4\nbatch_experiences_min = 5", r"batch_experiences_min = 5: is more than"),
        ("memory.queue_experiences = 10", r"queue_experiences = 10: a batch needs 64"),
        (
            "memory.sequence_tokens = 1000001",
            r"memory\.sequence_tokens = 1000001: at most 1000000 tokens wait",
        ),
        ("advantage.kind = 'gae'", r"trainer\.advantage\.kind = 'gae'"),
        ("loss.clip_hgih = 0.3", r"trainer\.loss\.clip_hgih = 0\.3: unknown; did you mean 'clip_high'\?"),
        ("max_stalenes = 3", r"trainer\.max_stalenes = 3: unknown; did you mean 'max_staleness'\?"),
        ("steps_per_version = 0", r"trainer\.steps_per_version = 0"),
        ("optimizer.kind = 'sgd'", r"trainer\.optimizer\.kind = 'sgd'"),
        ("lineage = '../x'", r"trainer\.lineage = '\.\./x'"),
        ("loss.weight_max = 0.5", r"trainer\.loss\.weight_max = 0\.5"),
    ],
)
def test_a_setting_that_cannot_work_is_named(tmp_path: Path, lines: str, message: str) -> None:
    base = "base = 'somewhere'\n" if lines else ""
    with pytest.raises(SettingError, match=message):
        read(tmp_path, f"[trainer]\n{base}{lines}")


def test_grpo_with_groups_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, "[trainer]\nbase = 'x'\ngroup_size = 2\nadvantage.kind = 'grpo'").compares_groups
    assert not read(tmp_path, "[trainer]\nbase = 'x'\ngroup_size = 1").compares_groups


def started(**environ: Any) -> subprocess.CompletedProcess[str]:
    settings = {f"HEADRACE_{name}": str(value) for name, value in environ.items()}
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headrace_trainer"],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        timeout=30,
        check=False,
    )


def test_singletons_are_refused_before_torch_is_imported() -> None:
    result = started(TRAINER__BASE="x", TRAINER__GROUP_SIZE=1, TRAINER__ADVANTAGE__KIND="grpo")
    assert result.returncode == 2
    assert "setting trainer.group_size = 1: grpo compares runs of one task" in result.stderr
    assert "| torch" not in result.stderr


def settings(**more: Any) -> TrainerSettings:
    return complete(TrainerSettings).model_validate({"base": "folder", "backend": "ray", **more})


def test_its_section_is_part_of_the_trainers() -> None:
    chosen = settings(ray={"ranks": 3, "shard": "full"}).of("ray")
    assert isinstance(chosen, RaySettings)
    assert (chosen.ranks, chosen.shard, chosen.address) == (3, "full", "")
    assert isinstance(settings().of("ray"), RaySettings)


def test_a_client_of_a_cluster_is_no_machine_of_it() -> None:
    with pytest.raises(SettingError, match=r"trainer\.ray\.address"):
        settings(ray={"address": "ray://head:10001"})


def test_without_ray_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"headrace-trainer\[ray\]"):
        BACKENDS.get("ray").open(Path("folder"), settings())


def test_reading_settings_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from headrace_runtime.settings.sections import complete;"
        "from headrace_trainer.settings import TrainerSettings;"
        "complete(TrainerSettings).model_validate({'base': 'x', 'backend': 'ray', 'ray': {'ranks': 4}});"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.strip() == "[]", process.stderr


def test_a_setting_error_crosses_processes_with_its_name_and_its_sentence() -> None:
    error = SettingError("trainer.ray.ranks", 3, "too many")
    restored = pickle.loads(pickle.dumps(error))
    assert isinstance(restored, SettingError)
    assert (str(restored), restored.name) == (str(error), "trainer.ray.ranks")


def test_the_network_of_an_address_is_found() -> None:
    assert cluster.interface_of("127.0.0.1") == "lo"
    assert cluster.interface_of("203.0.113.7") is None
    assert cluster.interface_of("::1") is None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def base(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "model"))


async def problems(base: Path) -> list[str]:
    return await check(Common(), TrainerSettings(base=str(base)))


async def test_a_whole_base_is_fine(base: Path) -> None:
    assert await problems(base) == []


async def test_a_template_inside_the_tokenizers_configuration_is_found(base: Path) -> None:
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    (message,) = await problems(base)
    assert "has no chat template" in message
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert await problems(base) == []
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert await problems(base) == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "is not valid"),
        ("{{ messages[0].content.nothing() }}", "does not take messages: UndefinedError"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "does not take messages: TemplateError: roles must alternate",
        ),
        ("{{ messages | nofilter }}", "is not valid"),
        ("{% if tools %}{{ tools.x.y }}{% endif %}{{ messages | tojson }}", "does not take tools"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            "does not take a tool call and its result: TemplateError: no tools",
        ),
        ("hello", "leaves out what the user says"),
    ],
)
async def test_a_template_is_rendered_with_tools(base: Path, template: str, message: str) -> None:
    (base / "chat_template.jinja").write_text(template)
    (problem,) = await problems(base)
    assert problem.startswith(f"setting trainer.base = {str(base)!r}: its chat template")
    assert message in problem


async def test_marks_of_generation_and_loop_controls_are_known(base: Path) -> None:
    (base / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert await problems(base) == []


async def test_what_is_missing_or_broken_is_named(base: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (base / "tokenizer.json").write_text("{}")
    (base / "config.json").write_text("{")
    message = "\n".join(await problems(base))
    assert "10 bytes are missing" in message
    assert "tokenizer.json cannot be used" in message
    assert "has no config.json that can be read" in message
    weights.write_bytes(b"PK\x03\x04 this is a pickle in a zip")
    assert "is not a safetensors file: its header has an impossible length" in "\n".join(await problems(base))
    (only,) = await problems(base / "nowhere")
    assert "is not a folder" in only


def test_without_a_comparison_torch_is_not_imported(base: Path) -> None:
    code = (
        "import asyncio, sys; from headrace_trainer.check import check;"
        "from headrace_runtime.settings.sections import Common; from headrace_trainer.settings import TrainerSettings;"
        f"assert not asyncio.run(check(Common(), TrainerSettings(base={str(base)!r}, native={{'tokens': 0}})));"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


FOREIGN = ("m@000000000000", "m@111111111111", "m@222222222222")


def recording(count: int) -> list[Experience]:
    """Return experiences of three versions of another lineage, each far beyond any staleness bound."""
    return [experience(n, FOREIGN[n % 3], reward=float(n % 2), task="t") for n in range(count)]


def trained(folder: Path, settings: TrainerSettings, events: Iterable[Experience]) -> ShortRun:
    training = ShortTraining(settings, BlobStore((folder / "blobs").as_uri()))
    for event in events:
        training.add(event)
    return training.end()


def weights(folder: Path, checkpoint: Checkpoint) -> object:
    return weight_digests(files.read_manifest(BlobStore((folder / "blobs").as_uri()), checkpoint.manifest))


def test_everything_is_trained_however_old_and_what_is_left_over_too(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(max_staleness=0), recording(10))
    assert (run.trained, run.dropped, run.steps) == (10, {}, 3), "batches of 4, 4 and 2"
    assert run.last.version != run.base.version
    assert weights(tmp_path, run.last) != weights(tmp_path, run.base)


def test_the_same_recording_gives_the_same_weights_and_other_rewards_give_others(tmp_path: Path, make: Make) -> None:
    events = recording(8)
    turned = [experience.model_copy(update={"reward": 1.0 - (experience.reward or 0.0)}) for experience in events]
    once, again, flipped = (
        weights(tmp_path, trained(tmp_path, make(lineage=name), some).last)
        for name, some in (("once", events), ("again", events), ("flipped", turned))
    )
    assert once == again
    assert once != flipped


def test_a_learning_rate_that_moves_nothing_ends_with_the_weights_of_the_base(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(optimizer={"learning_rate": 1e-300}), recording(8))
    assert (run.steps, run.trained) == (2, 8)
    assert weights(tmp_path, run.last) == weights(tmp_path, run.base)


def test_nothing_to_train_is_the_base(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(), [experience(1, FOREIGN[0], model="other")])
    assert (run.steps, run.trained, run.last) == (0, 0, run.base)
