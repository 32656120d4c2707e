"""Tests that packing does not change results, and that logprobs are computed at the temperature of the sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import masking_utils

from headrace_runtime.errors import SettingError
from headrace_trainer.batches.batch import Row
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner.model import attention, forward
from headrace_trainer.torch_learner.model.policy import Policy
from tests.support import tiny_model
from tests.unit.trainer.world import experience

V = "m@000000000000"


def open_policy(base: Path, rank: int = 0, **compute: Any) -> Policy:
    return Policy.open(base, ComputeSettings(device="cpu", **compute), LoraSettings(rank=rank), seed=1)


def rows(**fields: Any) -> list[Row]:
    return [Row.of(experience(n, V, length=6 + 5 * n, **fields), 1.0, None) for n in range(1, 5)]


def one_by_one(base: Path, row: Row, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of one row by transformers' own attention, without packing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if model.config.model_type != "mamba":
        model.set_attn_implementation("eager")
    token_ids = torch.tensor(row.token_ids_T, dtype=torch.long)
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0]
    logprobs = torch.log_softmax(logits[:-1] / temperature, -1)
    chosen: torch.Tensor = logprobs[torch.arange(len(token_ids) - 1), token_ids[1:]][torch.tensor(row.loss_mask_T[1:])]
    return chosen


@pytest.mark.parametrize("packing", ["blocks", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_pack_answers_as_its_rows_one_by_one(base: Path, packing: str, temperature: float) -> None:
    policy, several = open_policy(base, packing=packing), rows(temperature=temperature)
    packed_N, entropy_N = policy.logprobs(policy.collate(several))
    alone_N = torch.cat([one_by_one(base, row, temperature) for row in several])
    torch.testing.assert_close(packed_N, alone_N, atol=2e-6, rtol=0)
    assert (entropy_N > 0).all()


@pytest.mark.parametrize("packing", ["blocks", "padded"])
def test_gradients_of_a_pack_are_the_sum_of_its_rows_gradients(base: Path, packing: str) -> None:
    def gradient(*groups: list[Row]) -> dict[str, torch.Tensor]:
        policy = open_policy(base, packing=packing)
        for group in groups:
            policy.logprobs(policy.collate(group))[0].sum().backward()  # type: ignore[no-untyped-call]
        return {name: parameter.grad for name, parameter in policy.parameters.items() if parameter.grad is not None}

    several = rows()
    together, apart = gradient(several), gradient(*[[row] for row in several])
    assert together.keys() == apart.keys()
    assert together
    for name in together:
        torch.testing.assert_close(together[name], apart[name], atol=2e-5, rtol=1e-4)


def test_neighbours_in_a_pack_do_not_see_each_other(base: Path) -> None:
    policy, several = open_policy(base), rows()
    before_N = policy.logprobs(policy.collate(several))[0]
    other = Row(**{**several[0].__dict__, "token_ids_T": (several[0].token_ids_T + 1) % 320})
    after_N = policy.logprobs(policy.collate([other, *several[1:]]))[0]
    first = int(several[0].loss_mask_T.sum())
    assert not torch.equal(before_N[:first], after_N[:first])
    assert torch.equal(before_N[first:], after_N[first:])


def test_a_wrong_boundary_would_be_noticed(base: Path) -> None:
    """The test above can fail: with one long block, rows attend to each other."""
    policy, several = open_policy(base), rows()
    pack = policy.collate(several)
    leaky = forward.Pack(**{**pack.__dict__, "bounds": (0, pack.bounds[-1])})
    assert (policy.logprobs(pack)[0] - policy.logprobs(leaky)[0]).abs().max() > 1e-3


def test_pitfall_4_a_low_temperature_has_ratio_one(base: Path) -> None:
    """The engine's logprobs include the temperature; recomputed at the same temperature they give a ratio of 1."""
    policy, (row, *_) = open_policy(base), rows(temperature=0.6)
    pack = policy.collate([row])
    engine_N = one_by_one(base, row, temperature=0.6)
    ratio_N = (policy.logprobs(pack)[0] - engine_N).exp()
    torch.testing.assert_close(ratio_N, torch.ones_like(ratio_N), atol=1e-5, rtol=0)
    raw_N = (policy.logprobs(pack)[0] - one_by_one(base, row)).exp()
    assert (raw_N - 1).abs().max() > 0.05, "with raw logprobs it would not be"


def test_entropy_is_that_of_the_distribution(base: Path) -> None:
    policy, (row, *_) = open_policy(base), rows(temperature=0.5)
    pack = policy.collate([row])
    logits_NV = forward.logits(policy.model, pack).detach()
    probabilities_NV = (logits_NV / 0.5).softmax(-1)
    expected = -(probabilities_NV * probabilities_NV.log()).sum(-1)
    torch.testing.assert_close(policy.logprobs(pack)[1], expected, atol=1e-5, rtol=0)


def seen(lengths: tuple[int, ...], mask_function: Any = masking_utils.causal_mask_function, **mask_args: Any) -> Any:
    with attention.row_of_sequences(attention.bounds_of(lengths)):
        total = sum(lengths)
        return attention._mask_object(q_length=total, kv_length=total, mask_function=mask_function, **mask_args)


def by_hand(
    query: Any, key: Any, value: Any, spans: tuple[tuple[int, int], ...], sees: Any, **how: Any
) -> torch.Tensor:
    """Return the attention, one head and one sequence at a time. `sees(q, k)` has positions inside the sequence."""
    answers = torch.zeros(query.shape[2], query.shape[1], query.shape[3])
    for start, stop in spans:
        for t in range(start, stop):
            keys = [k for k in range(start, t + 1) if sees(t - start, k - start)]
            scores = (query[0, :, t, None] * key[0, :, keys]).sum(-1) / np.sqrt(query.shape[3])
            if cap := how.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            exps = scores.exp()
            nowhere = how["s_aux"].exp() if "s_aux" in how else 0.0
            answers[t] = (exps[..., None] * value[0, :, keys]).sum(1) / (exps.sum(-1) + nowhere)[..., None]
    return answers


def some_heads(heads: int = 2, length: int = 10) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, heads, length, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))


@pytest.mark.parametrize(
    ("mask_function", "sees"),
    [
        (masking_utils.causal_mask_function, lambda q, k: True),
        (masking_utils.sliding_window_causal_mask_function(3), lambda q, k: q - k < 3),
        (
            masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
            lambda q, k: q // 4 == k // 4,
        ),
    ],
    ids=["causal", "window", "chunks"],
)
@pytest.mark.parametrize(
    "how", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.3, -1.0])}], ids=["plain", "cap", "aux"]
)
def test_a_sequence_sees_what_the_models_mask_shows_it(mask_function: Any, sees: Any, how: dict[str, Any]) -> None:
    local = {"local_size": 3} if mask_function is not masking_utils.causal_mask_function else {}
    query, key, value = some_heads()
    output, _ = attention.attend(None, query, key, value, seen((6, 4), mask_function, **local), **how)
    expected = by_hand(query, key, value, ((0, 6), (6, 10)), sees, **how)
    torch.testing.assert_close(output[0], expected, atol=1e-5, rtol=1e-5)


def test_grouped_heads_share_their_keys(base: Path) -> None:
    query = torch.randn(1, 4, 5, 8)
    key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    output, _ = attention.attend(None, query, key, value, seen((5,)))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_attention_that_needs_more_is_refused() -> None:
    some = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="more than plain attention"):
        attention.attend(None, some, some, some, seen((2,)), position_bias=some)
    with pytest.raises(NotImplementedError, match="builds a mask of its own"):
        attention.attend(None, some, some, some, None)


SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "sliding_window": 4,
}  # fmt: skip


def build_other(folder: Path, kind: str) -> Path:
    """Build a model of another architecture with the tiny model's tokenizer, and return its folder."""
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    tiny_model.build(folder, layers=1)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "packing"),
    [("Llama", "blocks"), ("Mistral", "blocks"), ("Gemma2", "blocks"), ("Gemma2", "padded"), ("Mamba", "padded")],
)
def test_other_architectures_answer_as_their_rows_one_by_one(tmp_path: Path, kind: str, packing: str) -> None:
    base = build_other(tmp_path, kind)
    policy, several = open_policy(base, packing=packing), rows()
    alone_N = torch.cat([one_by_one(base, row) for row in several])
    torch.testing.assert_close(policy.logprobs(policy.collate(several))[0], alone_N, atol=5e-6, rtol=0)


def test_a_model_that_cannot_be_packed_is_refused_at_the_start(tmp_path: Path) -> None:
    message = r'compute\.packing = .blocks.: MambaForCausalLM cannot be packed \(.* differ by .* nats\); set "padded"'
    with pytest.raises(SettingError, match=message):
        open_policy(build_other(tmp_path, "Mamba"))


def test_bfloat16_is_close_and_what_is_trained_stays_float32(base: Path) -> None:
    exact, rough, several = open_policy(base), open_policy(base, dtype="bfloat16"), rows()
    left, right = (policy.logprobs(policy.collate(several))[0] for policy in (exact, rough))
    assert 0 < (left - right).abs().max() < 0.05
    assert right.dtype == torch.float32
    for policy in (rough, open_policy(base, 4, dtype="bfloat16")):
        assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("rank", [0, 4])
def test_recomputing_activations_gives_the_same_gradient(base: Path, rank: int) -> None:
    runs = []
    for checkpointing in (False, True):
        policy = open_policy(base, rank, gradient_checkpointing=checkpointing)
        policy.logprobs(policy.collate(rows()))[0].sum().backward()  # type: ignore[no-untyped-call]
        runs.append([p.grad for p in policy.parameters.values() if p.grad is not None and p.grad.abs().sum() > 0])
    assert len(runs[0]) == len(runs[1]) > 3
    for plain, again in zip(*runs, strict=True):
        torch.testing.assert_close(plain, again, atol=1e-5, rtol=1e-4)


def test_a_device_that_is_not_there_is_a_setting_error(base: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.compute\.device = 'cuda:77'"):
        Policy.open(base, ComputeSettings(device="cuda:77"), LoraSettings(), 0)


def test_targets_that_are_not_there_are_a_setting_error(base: Path) -> None:
    with pytest.raises(SettingError, match=r"trainer\.lora\.targets"):
        Policy.open(base, ComputeSettings(), LoraSettings(rank=2, targets=("nonsense",)), 0)
