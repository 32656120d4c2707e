"""Tests of the start check, which compares our logprobs with the model's eager attention, and detects injected
faults."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from tokenizers import Tokenizer

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_trainer import check
from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.templates import load_tokenizer
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import ComputeSettings, LoraSettings, TrainerSettings
from headrace_trainer.torch_learner import native
from headrace_trainer.torch_learner.model import attention, policy
from headrace_trainer.torch_learner.model.blocks import Block
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.native import NativeLogprobs, compare_base
from tests.architectures.catalog import CATALOG
from tests.support import tiny_model
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World

Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that builds each model of the catalogue once."""
    built: dict[str, Path] = {}

    def _build(name: str) -> Path:
        if name not in built:
            (architecture,) = [case for case in CATALOG if case.name == name]
            built[name] = architecture.build(tmp_path_factory.mktemp("model"))
        return built[name]

    return _build


def settings(base: Path, **sections: Any) -> TrainerSettings:
    sections["compute"] = {"device": "cpu", **sections.get("compute", {})}
    return TrainerSettings.model_validate({"base": str(base), **sections})


def without_mask(_: attention.SequenceMask, length: int) -> tuple[Block, ...]:
    return (Block(0, length, 0, length, None),)


FAULTS: list[tuple[str, str, str, Any, str]] = [
    ("Mistral, sliding window", "attention.SequenceMask.of", "blocks", without_mask, "beyond sliding_window = 24"),
    ("Llama 4", "attention.SequenceMask.of", "blocks", without_mask, "beyond attention_chunk_size = 32"),
    ("Mixtral, sliding window", "attention.SequenceMask.of", "blocks", without_mask, "beyond sliding_window = 24"),
    ("Llama, longrope", "attention.replace_length_ropes", "blocks", lambda _: None, "nats in short sequences"),
    ("Llama, longrope", "attention.replace_length_ropes", "padded", lambda _: None, "nats in short sequences"),
    ("Gemma 2", "policy._padded_attention", "padded", lambda _: None, r"0\.0\d+ nats"),
]


@pytest.mark.parametrize(("name", "where", "packing", "fault", "message"), FAULTS, ids=lambda value: str(value)[:24])
@pytest.mark.long
def test_a_planted_fault_is_refused_with_its_place(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str, where: str, packing: str, fault: Any, message: str
) -> None:
    of_base = settings(models(name), compute={"packing": packing})
    comparison = compare_base(of_base)
    assert comparison.difference is not None
    assert comparison.difference < 5e-5
    module, _, attribute = where.partition(".")
    monkeypatch.setattr(f"headrace_trainer.torch_learner.model.{module}.{attribute}", fault)
    setting = "compute.packing = 'blocks'" if packing == "blocks" else "base = "
    with pytest.raises(SettingError, match=rf"trainer\.{setting}.*differs from its own eager.*{message}"):
        compare_base(of_base)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("GPT-J", "its code accepts only a fixed list of attentions"), ("BLOOM", "does not accept this attention")],
)
def test_attention_of_another_kind_is_refused_by_name(models: Models, name: str, reason: str) -> None:
    with pytest.raises(SettingError, match=rf"packing = 'blocks': \w+ForCausalLM cannot be packed .*{reason}.*padded"):
        compare_base(settings(models(name)))


def test_one_key_too_many_is_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = attention.SequenceMask.of

    def wider(seen: attention.SequenceMask, length: int) -> tuple[Block, ...]:
        (block,) = exact(seen, length)
        if block.mask is None:
            return (block,)
        return (replace(block, mask=block.mask | torch.nn.functional.pad(block.mask, (0, 1))[..., 1:]),)

    monkeypatch.setattr(attention.SequenceMask, "of", wider)
    with pytest.raises(SettingError, match=r"nats .*sliding_window = 24"):
        compare_base(settings(models("Mistral, sliding window")))


def test_a_short_comparison_cannot_find_it_and_says_so(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences must be longer than the attention window; a smaller budget reports the parts that were not
    compared."""
    monkeypatch.setattr(attention.SequenceMask, "of", without_mask)
    comparison = compare_base(settings(models("Mistral, sliding window"), native={"tokens": 24}))
    assert comparison.difference is not None
    assert comparison.tokens == 24
    assert comparison.unseen == (
        "sequences of 57 tokens",
        "sequences of 200 tokens",
        "tokens beyond sliding_window = 24",
    )


def test_the_start_refuses_before_anything_is_published(
    models: Models, monkeypatch: pytest.MonkeyPatch, make: Make, tmp_path: Path
) -> None:
    world = World(tmp_path / "world")
    base = Path(shutil.copytree(tiny_model.build(tmp_path / "tokenizer", layers=1), tmp_path / "base"))
    (base / "model.safetensors").unlink()
    shutil.copytree(models("Mistral, sliding window"), base, dirs_exist_ok=True)
    monkeypatch.setattr(attention.SequenceMask, "of", without_mask)
    with pytest.raises(SettingError, match="MistralForCausalLM differs from"):
        open_lineage(make(base=str(base)), world.blobs, world.clock)
    assert LineageStore(world.blobs, make().lineage).read() is None
    monkeypatch.undo()
    with structlog.testing.capture_logs() as logs:
        open_lineage(make(base=str(base)), world.blobs, world.clock)
    (entry,) = [line for line in logs if line["event"] == "native_compared"]
    assert entry["architecture"] == "MistralForCausalLM"
    assert entry["difference"] < 5e-5


def test_what_was_not_compared_is_in_the_log(make: Make, tmp_path: Path) -> None:
    world = World(tmp_path)
    with structlog.testing.capture_logs() as logs:
        open_lineage(make(native={"tokens": 0}), world.blobs, world.clock)
    (entry,) = [line for line in logs if line["event"].startswith("native")]
    assert entry["event"] == "native_not_compared"
    assert entry["log_level"] == "warning"
    assert (entry["what"], entry["remedy"]) == ("anything", "raise trainer.native.tokens")


def test_a_wider_bound_accepts_it(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_padded_attention", lambda _: None)
    comparison = compare_base(
        settings(models("Gemma 2"), compute={"packing": "padded"}, native={"difference_max": 0.2})
    )
    assert comparison.difference is not None
    assert 1e-3 < comparison.difference < 0.2


@pytest.mark.parametrize("name", ["Llama", "Mistral, sliding window", "Qwen 3"])
def test_frozen_weights_in_bfloat16_are_compared_by_their_means(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    of_base = settings(models(name), lora={"rank": 4}, compute={"dtype": "bfloat16"})
    comparison = compare_base(of_base)
    assert comparison.difference is not None
    assert 0 < comparison.difference < 0.1, "rounding is within the bound"
    monkeypatch.setattr(attention.SequenceMask, "of", without_mask)
    if "window" in name:
        with pytest.raises(SettingError, match="beyond sliding_window"):
            compare_base(of_base)


def test_few_tokens_that_went_to_other_experts_are_no_fault(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = native._logprobs

    def rerouted(*arguments: Any) -> torch.Tensor:
        logprobs_N = exact(*arguments)
        logprobs_N[::20] += 0.5
        return logprobs_N

    monkeypatch.setattr(native, "_logprobs", rerouted)
    assert (compare_base(settings(models("Mixtral"))).difference or 0) < 1e-4
    with pytest.raises(SettingError, match=r"0\.5 nats"):
        compare_base(settings(models("Llama")))


def test_a_number_that_is_none_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_logprobs", lambda policy, batch: torch.full(batch.targets_N.shape, float("nan")))
    with pytest.raises(SettingError, match="by nan nats"):
        compare_base(settings(models("Llama")))


def test_no_room_for_the_comparison_names_its_setting(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(native, "_single_pass_logprobs", full)
    with pytest.raises(SettingError, match=r"trainer\.native\.tokens = 8192: LlamaForCausalLM runs out of memory"):
        compare_base(settings(models("Llama")))


@pytest.mark.parametrize("packing", ["blocks", pytest.param("padded", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["Llama, dynamic NTK rope", "Llama, longrope", "Phi 3, longrope"])
def test_rope_by_length_is_that_of_each_sequence_alone(models: Models, name: str, packing: Any) -> None:
    """The sequences may exceed the context, in any order and after any others."""
    base, rng = models(name), np.random.default_rng(0)
    policy = Policy.open(base, ComputeSettings(device="cpu", packing=packing), LoraSettings(), 0)
    for lengths in ((300, 40, 420), (40, 70), (20, 350)):
        rows = [_row(rng.integers(3, 160, length)) for length in lengths]
        own_N = torch.cat([_fresh(base, row) for row in rows])
        with torch.no_grad():
            torch.testing.assert_close(policy.logprobs(policy.collate(rows))[0], own_N, atol=5e-5, rtol=0)


def _row(token_ids: Any) -> Row:
    mask, zeros = np.arange(len(token_ids)) > 0, np.zeros(len(token_ids), np.float32)
    return Row("", 0, token_ids.astype(np.int32), mask, zeros, zeros + 1, np.float32(0), ~mask)


def _fresh(base: Path, row: Row) -> torch.Tensor:
    """Return the logprobs of a fresh model, because transformers caches the length of the longest sequence."""
    model = policy.from_folder(base, torch.float32, "eager").eval()
    with torch.no_grad():
        return native._single_pass_logprobs(model, row.token_ids_T, row.loss_mask_T, torch.device("cpu"))


class Config:
    """The fields of a configuration that a plan reads."""

    def __init__(self, **values: Any) -> None:
        self._values = {"vocab_size": 100, "max_position_embeddings": 32_768, "eos_token_id": 7, **values}
        vars(self).update(self._values)

    def to_dict(self) -> dict[str, Any]:
        return self._values


def test_a_plan_reaches_beyond_what_may_be_trained_and_no_further() -> None:
    of_base = settings(Path("x"))
    plain = native.plan_comparison(Config(), of_base)
    assert [row.length for row in plain.rows] == [24, 57, 200]
    assert all(7 not in row.token_ids_T for row in plain.rows), "no token that means something to the model"
    long = Config(sliding_window=4096, rope_parameters={"full": {"original_max_position_embeddings": 2048}})
    plan = native.plan_comparison(long, of_base)
    assert [row.length for row in plan.rows] == [24, 57, 200, 2081, 4129]
    assert plan.unseen == ()
    beyond = plan.regions["beyond sliding_window = 4096"]
    assert beyond.sum() == 32, "what the last row predicts from position 4096 on"
    assert sum(row.loss_mask_T.sum() for row in plan.rows) == sum(mask.sum() for mask in plan.regions.values())
    short = settings(Path("x"), memory={"sequence_tokens": 8192})
    assert native.plan_comparison(Config(sliding_window=8192), short).unseen == (), "nothing so long is trained"
    budget = settings(Path("x"), memory={"sequence_tokens": 16_384})
    assert native.plan_comparison(Config(sliding_window=8192), budget).unseen == (
        "tokens beyond sliding_window = 8192",
    )


def test_a_row_of_several_sequences_is_as_wide_as_a_step_makes_it() -> None:
    """Some models count positions along the whole row, so that only a wide row shows a difference."""
    config = Config(max_position_embeddings=256, floor_scale=1000)
    lengths = [row.length for row in native.plan_comparison(config, settings(Path("x"))).rows]
    assert sum(lengths) > 1000
    assert max(lengths) == 256
    padded = native.plan_comparison(config, settings(Path("x"), compute={"packing": "padded"}))
    assert sum(row.length for row in padded.rows) < 300


async def test_config_check_compares_a_small_base(models: Models, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    assert await check.check(Common(), settings(base)) == []
    monkeypatch.setattr(check, "_problems", lambda _: iter(()))
    of_base = settings(models("Llama 4, temperature by position"))
    with pytest.raises(SettingError, match=r"Llama4ForCausalLM differs from.*set \"padded\""):
        await check.check(Common(), of_base)
    monkeypatch.setattr(check, "_COMPARED_BYTES_MAX", 1000)
    assert await check.check(Common(), of_base) == [], "the start will compare it"


def test_the_two_are_never_in_memory_together(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    opened: list[Any] = []
    load = policy.from_folder

    def watched(*arguments: Any) -> Any:
        model = load(*arguments)
        opened.append(weakref.ref(model))
        return model

    monkeypatch.setattr(native, "from_folder", watched)
    stored = NativeLogprobs(base, settings(base))
    gc.collect()
    assert [model() for model in opened] == [None]
    assert stored.compare(Policy.open(base, ComputeSettings(device="cpu"), LoraSettings(), 0)).difference is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": math.nan}, "its logprobs contain NaN"),
        ({"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, "its logprobs contain NaN"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"num_attention_heads": 0}, "division"),
        ({"dtype": "float8_nope"}, "float8_nope"),
        ({"layer_types": ["full_attention"] * 5}, "layer_type"),
    ],
    ids=str,
)
async def test_a_damaged_configuration_is_a_sentence_about_the_base(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    base = tiny_model.build(tmp_path / "base")
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(SettingError, match=rf"trainer\.base.*{words}"):
        await check.check(Common(), settings(base))


async def test_a_damaged_header_of_weights_is_a_sentence_about_the_base(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    with (base / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(SettingError, match=r"trainer\.base.*not fully covered"):
        await check.check(Common(), settings(base))


def test_a_tokenizer_file_with_truncation_and_padding_leaves_texts_whole(tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    text = "Which mail is about the invoice?"
    token_ids = load_tokenizer(base).encode(text).ids
    file = Tokenizer.from_file(str(base / "tokenizer.json"))
    file.enable_truncation(max_length=4)
    file.enable_padding(length=256)
    file.save(str(base / "tokenizer.json"))
    assert load_tokenizer(base).encode(text).ids == token_ids
