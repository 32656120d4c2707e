"""Tests of published versions, and of excluded versions.

A published version answers as its fingerprint, has the files of its base, and never equals its parent (P7). The answers
of an excluded version are not trained, and are removed from the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace_runtime.errors import SettingError
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import FINGERPRINT_TOKENS, VersionCache, fingerprint_tokens
from headrace_schemas import ModelEvent, RolloutStep
from headrace_schemas.values.blobs import BlobRef, Fingerprint, Manifest
from headrace_trainer.learner import VERSION
from headrace_trainer.lineage import versions
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import ComputeSettings, LoraSettings, TrainerSettings
from headrace_trainer.torch_learner import version_files
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.trainer import Trainer
from tests.support import tiny_model
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_forward import open_policy
from tests.unit.trainer.world import World, decision, experience, policy_of


def disturb(policy: Policy, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def answers(model: Any, fingerprint: Fingerprint) -> torch.Tensor:
    token_ids = torch.tensor(fingerprint.token_ids)
    with torch.no_grad():
        logprobs_TV = model(token_ids[None]).logits[0, :-1].float().log_softmax(-1)
    chosen: torch.Tensor = logprobs_TV.gather(-1, token_ids[1:, None])[:, 0]
    return chosen


def learner(base: Path, rank: int = 0) -> TorchLearner:
    policy = open_policy(base, rank)
    settings = TrainerSettings(base=str(base))
    chosen = settings.optimizer.with_rate_for_size(policy.size, adapters=policy.lora)
    return TorchLearner(policy, Optimizer(policy.parameters, chosen), settings, version_files.dtype_of(base))


def publish_base(blobs: BlobStore, base: Path, learner: TorchLearner) -> tuple[Manifest, BlobRef]:
    return versions.publish_base(blobs, versions.store_base_files(blobs, base), learner, name="m", lineage="main")


def publish(blobs: BlobStore, learner: TorchLearner, first: Manifest) -> tuple[Manifest, BlobRef]:
    kind = learner.abilities.kind
    with tempfile.TemporaryDirectory() as folder:
        copy = learner.copy(first.version)
        copy.write(Path(folder))
        assert copy.fingerprint is not None
        return versions.publish_version(
            blobs,
            Path(folder) / VERSION,
            copy.fingerprint,
            first=first,
            lineage="main",
            step=1,
            parent=first.version,
            kind=kind,
        )


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_version_read_back_answers_as_its_fingerprint(base: Path, tmp_path: Path, rank: int) -> None:
    blobs, trained = BlobStore((tmp_path / "blobs").as_uri()), learner(base, rank)
    first, first_ref = publish_base(blobs, base, trained)
    disturb(trained.policy)
    manifest, ref = publish(blobs, trained, first)
    cache = VersionCache(blobs, tmp_path / "cache")
    _, first_folder = await cache.fetch(first_ref)
    _, folder = await cache.fetch(ref)

    base_model = AutoModelForCausalLM.from_pretrained(first_folder)
    torch.testing.assert_close(answers(base_model, first.fingerprint), torch.tensor(first.fingerprint.logprobs))
    model = PeftModel.from_pretrained(base_model, folder) if rank else AutoModelForCausalLM.from_pretrained(folder)
    expected = torch.tensor(manifest.fingerprint.logprobs)
    torch.testing.assert_close(answers(model, manifest.fingerprint), expected, atol=1e-5, rtol=0)
    assert (expected - torch.tensor(first.fingerprint.logprobs)).abs().max() > 1e-3, "and not as its parent"

    assert (manifest.kind, manifest.base) == (("lora", first.version) if rank else ("full", None))
    assert (manifest.tokenizer_sha256, manifest.template_sha256) == (first.tokenizer_sha256, first.template_sha256)
    if not rank:
        changed = [a.path for a, b in zip(first.files, manifest.files, strict=True) if a != b]
        assert changed == ["model.safetensors"], "everything else is the base's, byte for byte"


@pytest.mark.parametrize("rank", [0, 4])
def test_equal_weights_make_equal_versions_and_no_path_gets_in(base: Path, tmp_path: Path, rank: int) -> None:
    blobs, versions = BlobStore(tmp_path.as_uri()), []
    for _ in range(2):
        trained = learner(base, rank)
        first, _ = publish_base(blobs, base, trained)
        disturb(trained.policy)
        manifest, _ = publish(blobs, trained, first)
        versions.append(manifest.version)
        for file in manifest.files:
            assert str(base).encode() not in blobs.get(file.blob), file.path
    assert versions[0] == versions[1]


def test_a_version_is_served_in_the_type_of_its_base(tmp_path: Path) -> None:
    """The version is trained in float32 and published in the base's bfloat16; its fingerprint is of the rounded
    weights."""
    base = tiny_model.build(tmp_path / "base", layers=1)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    blobs, trained = BlobStore((tmp_path / "blobs").as_uri()), learner(base)
    first, _ = publish_base(blobs, base, trained)
    disturb(trained.policy)
    manifest, _ = publish(blobs, trained, first)
    (weights,) = (file for file in manifest.files if file.path.endswith(".safetensors"))
    (tmp_path / "w.safetensors").write_bytes(blobs.get(weights.blob))
    served = load_file(tmp_path / "w.safetensors")
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}
    versions.load_weights(blobs, manifest, trained)
    assert trained.policy.fingerprint().logprobs == pytest.approx(manifest.fingerprint.logprobs, abs=1e-5)


def test_an_untied_head_and_several_weight_files_survive(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base", layers=1)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 0.5)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    blobs, trained = BlobStore((tmp_path / "blobs").as_uri()), learner(base)
    first, _ = publish_base(blobs, base, trained)
    disturb(trained.policy)
    manifest, _ = publish(blobs, trained, first)
    assert [file.path for file in manifest.files if "safetensors" in file.path] == ["model.safetensors"]
    mine = trained.policy.tensors()
    again = learner(base)
    versions.load_weights(blobs, manifest, again)
    assert "lm_head.weight" in mine
    assert all(torch.equal(tensor, mine[name]) for name, tensor in again.policy.tensors().items())


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_can_be_taken_back_from_a_version(base: Path, tmp_path: Path, rank: int) -> None:
    blobs, trained = BlobStore(tmp_path.as_uri()), learner(base, rank)
    first, _ = publish_base(blobs, base, trained)
    disturb(trained.policy, 1)
    manifest, _ = publish(blobs, trained, first)
    then = trained.policy.tensors()
    disturb(trained.policy, 2)
    versions.load_weights(blobs, manifest, trained)
    assert all(torch.equal(tensor, then[name]) for name, tensor in trained.policy.tensors().items())


@pytest.mark.parametrize("vocabulary", [2, 64, 320, 600, 151_936])
def test_the_fingerprint_walks_through_the_vocabulary(vocabulary: int) -> None:
    token_ids = fingerprint_tokens(vocabulary)
    assert token_ids == fingerprint_tokens(vocabulary)
    assert len(token_ids) == FINGERPRINT_TOKENS
    assert all(0 <= token < vocabulary for token in token_ids)
    assert len(set(token_ids)) == min(vocabulary, FINGERPRINT_TOKENS)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model.safetensors", "has no weights in safetensors"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("", "is not a folder"),
    ],
)
def test_a_base_that_cannot_be_one_is_a_setting_error(base: Path, tmp_path: Path, remove: str, message: str) -> None:
    copy = tmp_path / "copy"
    if remove:
        shutil.copytree(base, copy)
        (copy / remove).unlink()
    with pytest.raises(SettingError, match=f"trainer.base = .*{message}"):
        versions.check_base(copy)


@pytest.mark.parametrize(
    ("file", "content"), [("model.safetensors", b"\x80\x04pickle"), ("config.json", b'{"model_type": "nonsense"}')]
)
def test_a_base_that_does_not_load_is_a_setting_error(base: Path, tmp_path: Path, file: str, content: bytes) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    (copy / file).write_bytes(content)
    with pytest.raises(SettingError, match=r"trainer\.base"):
        Policy.open(copy, ComputeSettings(), LoraSettings(), 0)


def test_another_base_under_an_old_lineage_is_a_setting_error(base: Path, tmp_path: Path) -> None:
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    first, _ = publish_base(blobs, base, learner(base))
    versions.check_same_base(base, first, "main")
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    config = json.loads((copy / "config.json").read_text()) | {"rope_theta": 1.0}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match=r"config\.json differ from what lineage main started from"):
        versions.check_same_base(copy, first, "main")
    assert hashlib.sha256((base / "config.json").read_bytes()).hexdigest() in {f.blob.sha256 for f in first.files}


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_base_that_goes_away_once_training_has_begun_changes_nothing(
    base: Path, tmp_path: Path, make: Make, rank: int
) -> None:
    copy, world = tmp_path / "copy", World(tmp_path)
    shutil.copytree(base, copy)
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    lineage = open_lineage(make(base=str(copy), lora={"rank": rank}), world.blobs, world.clock)
    shutil.rmtree(copy)
    disturb(policy_of(lineage))
    lineage._tensors_moved = True
    assert lineage.save(publish=True)
    manifest, folder = await VersionCache(world.blobs, tmp_path / "cache").fetch(lineage.saved.checkpoint.manifest)
    first, first_folder = await VersionCache(world.blobs, tmp_path / "cache").fetch(lineage.saved.versions[0].manifest)
    assert (first_folder / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"
    assert (manifest.tokenizer_sha256, manifest.template_sha256) == (first.tokenizer_sha256, first.template_sha256)
    assert rank or manifest.prompt_sha256 == first.prompt_sha256
    assert sorted(path.name for path in folder.glob("*.safetensors"))


async def test_a_base_that_changed_before_a_start_is_refused_before_anything_is_taken_over(
    base: Path, tmp_path: Path, make: Make
) -> None:
    copy, world = tmp_path / "copy", World(tmp_path)
    shutil.copytree(base, copy)
    lineage = open_lineage(make(base=str(copy)), world.blobs, world.clock)
    (copy / "chat_template.jinja").write_text("another")
    with pytest.raises(SettingError, match=r"chat_template\.jinja differ from what lineage main started from"):
        await world.run(make(base=str(copy)))
    lineage.save(publish=False)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def taken_back(version: str, previous: str, *, excludes: bool = True) -> ModelEvent:
    step = RolloutStep(rollout_id="r", kind="roll_back", stage=0, share="0", excludes=excludes)
    return decision(version, "withdrawn", previous).model_copy(update={"rollout": step})


def held_advantage(trainer: Trainer, number: int) -> float:
    """Return the sum of an experience's advantages that the weights contain."""
    assert trainer.lineage is not None
    state = trainer.lineage.state
    entry = state.window.get(f"e{number}")
    assert entry is not None
    return math.fsum(
        contribution.advantage for contribution in entry.contributions_in_weights(state.history, state.steps)
    )


async def beside(world: World, make: Make) -> tuple[str, str]:
    """Return the champion, and a version on live traffic that the weights do not descend from, because the gate
    refused it."""
    settings = make(max_staleness=9)
    await world.run(settings)
    champion = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, champion, reward=n % 3) for n in range(4)))
    await world.run(settings)
    canary = world.bus.checkpoints[1].version
    world.bus.produce(decision(canary, "rejected", champion))
    await world.run(settings)
    return champion, canary


async def test_what_was_trained_of_it_is_taken_back_and_the_rest_is_dropped(world: World, make: Make) -> None:
    settings = make(max_staleness=9)
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    before = await world.run(settings)
    assert [held_advantage(before, n) != 0 for n in range(20, 24)].count(True) >= 3
    before_others = [held_advantage(before, n) for n in range(4)]

    world.bus.produce(taken_back(canary, champion), experience(30, canary, reward=2.0))
    after = await world.run(settings, wait_s=31)
    assert {world.bus.fates[f"e{n}", 0] for n in (*range(20, 24), 30)} == {"excluded"}
    assert [held_advantage(after, n) for n in range(20, 24)] == pytest.approx([0.0] * 4, abs=1e-6)
    assert [held_advantage(after, n) for n in range(4)] == before_others, "the champion's stay"
    verdicts = {(verdict.dropped, verdict.detail) for verdict in world.bus.verdicts if verdict.detail == "excluded"}
    assert verdicts == {("withdrawn", "excluded")}, "a reason that older readers know"

    world.bus.produce(experience(20, canary, reward=9.0, revision=1), experience(31, canary, reward=1.0))
    later = await world.run(settings, wait_s=31)
    assert {world.bus.fates[key] for key in (("e20", 1), ("e31", 0))} == {"excluded"}, "after a restart, too"
    assert held_advantage(later, 20) == pytest.approx(0.0, abs=1e-6)


async def test_what_waits_is_dropped(world: World, make: Make) -> None:
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary) for n in range(20, 22)))
    world.bus.produce(taken_back(canary, champion))
    await world.run(make(max_staleness=9))
    assert {world.bus.fates[f"e{n}", 0] for n in (20, 21)} == {"excluded"}


async def test_weights_that_go_back_have_lost_it_and_do_not_learn_it_again(world: World, make: Make) -> None:
    """A withdrawn ancestor of the trained version is excluded: the champion's experiences are queued, its own are
    undone."""
    settings = make(max_staleness=9)
    await world.run(settings)
    champion = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, champion, reward=n % 3) for n in range(4)))
    await world.run(settings)
    canary = world.bus.checkpoints[1].version
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    await world.run(settings)
    world.bus.produce(taken_back(canary, champion))
    trainer = await world.run(make(max_staleness=9, batch_experiences=64))
    assert {world.bus.fates[f"e{n}", 0] for n in range(4)} == {"queued"}
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"undone"}
    assert [held_advantage(trainer, n) for n in range(20, 24)] == [0.0] * 4


@pytest.mark.parametrize("ends", ["kept", "promoted"])
async def test_without_the_setting_or_after_a_promotion_it_is_trained(world: World, make: Make, ends: str) -> None:
    champion, canary = await beside(world, make)
    world.bus.produce(taken_back(canary, champion, excludes=ends == "promoted"))
    if ends == "promoted":
        world.bus.produce(decision(canary, "promoted", champion))
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    await world.run(make(max_staleness=9))
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"trained"}


async def test_what_is_too_old_to_be_trained_stays(world: World, make: Make) -> None:
    """The staleness bound (P5) has priority, because a correction is a training, too."""
    champion, canary = await beside(world, make)
    world.bus.produce(*(experience(n, canary, reward=n % 3) for n in range(20, 24)))
    before = await world.run(make(max_staleness=9))
    stale = [held_advantage(before, n) for n in range(20, 24)]
    world.bus.produce(taken_back(canary, champion))
    after = await world.run(make(max_staleness=0), wait_s=31)
    assert [held_advantage(after, n) for n in range(20, 24)] == stale
    assert {world.bus.fates[f"e{n}", 0] for n in range(20, 24)} == {"trained"}, "the account says what the weights hold"
