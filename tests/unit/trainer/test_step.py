"""Tests that a step is one mean over the tokens of the batch, however the batch is packed, split or repeated."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_schemas import Branch, Experience, Span
from headrace_trainer.algorithms.loss import TokenLoss, clipped_loss
from headrace_trainer.algorithms.losses import LOSSES, Loss, LossInputs
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.learner import Abandoned, NotFinite
from headrace_trainer.settings import OptimizerSettings
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model import head
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.test_forward import one_by_one, open_policy
from tests.unit.trainer.world import experience

V = "m@000000000000"


def batch_of(*advantages: float, **fields: Any) -> Batch:
    return Batch(tuple(Row.of(experience(n, V, length=8 + 3 * n, **fields), a, V) for n, a in enumerate(advantages)))


def step(
    base: Path,
    batch: Batch,
    pack_tokens: int = 4096,
    *,
    learning_rate: float = 1e-3,
    rank: int = 0,
    stop: threading.Event | None = None,
    **loss: Any,
) -> tuple[Policy, Mapping[str, float]]:
    policy = open_policy(base, rank)
    if loss.get("kl"):
        policy.keep_reference(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=learning_rate))
    measured = train(policy, optimizer, batch, LossSettings(**loss), pack_tokens, stop or threading.Event()).measured
    return policy, measured


def gradients(base: Path, batch: Batch, pack_tokens: int = 4096, **loss: Any) -> dict[str, Tensor]:
    """Return the optimizer's gradients for `batch`. Without momentum, the optimizer applies them unchanged."""
    policy = open_policy(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5, gradient_norm_max=1e9, beta1=0.0))
    train(policy, optimizer, batch, LossSettings(**loss), pack_tokens, threading.Event())
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=3e-7, rtol=1e-4)


def test_pitfall_10_the_cut_into_passes_changes_nothing(base: Path) -> None:
    batch = batch_of(1.0, -0.5, 2.0, 0.3, -1.0)
    single_pass = gradients(base, batch)
    assert_equal(single_pass, gradients(base, batch, pack_tokens=30))
    assert_equal(single_pass, gradients(base, batch, pack_tokens=1))


def test_the_gradient_is_that_of_the_textbook(base: Path) -> None:
    """Compare with - 1/N sum of A min(w, cap) grad log p, by transformers' own forward pass and autograd."""
    batch = batch_of(1.0, -0.5, 2.0)
    policy = open_policy(base)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for row in batch.rows:
        token_ids = torch.tensor(row.token_ids_T, dtype=torch.long)
        logprobs = model(token_ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, token_ids[1:, None])[:, 0]
        mask = torch.tensor(row.loss_mask_T[1:])
        weight = (logprobs.detach() - torch.tensor(row.behaviour_T[1:])).exp().clamp(max=2.0)
        total = total - (float(row.advantage) * weight * logprobs)[mask].sum()
    (total / batch.loss_tokens).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if name in policy.parameters}
    assert_equal(gradients(base, batch), expected)


def test_pitfall_9_cutting_a_run_into_branches_changes_neither_tokens_nor_loss(base: Path) -> None:
    """One run has two spans in one branch, or the same spans in two branches over the same prefix."""
    token_ids = tuple(range(20, 36))
    first = Span(start=4, logprobs=(-5.0,) * 3, turn_id="a", version=V)
    second = Span(start=10, logprobs=(-6.0,) * 4, turn_id="b", version=V)

    def row(*spans: Span, weight: float) -> Row:
        event: Experience = experience(1, V, weight=weight)
        return Row.of(event.model_copy(update={"branch": Branch(token_ids=token_ids, spans=spans)}), 1.5, V)

    other = Row.of(experience(2, V), -1.0, V)
    single_pass = Batch((row(first, second, weight=1.0), other))
    split = Batch((row(first, weight=0.5), row(second, weight=0.5), other))
    assert single_pass.loss_tokens == split.loss_tokens
    assert_equal(gradients(base, single_pass), gradients(base, split))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"kl": 0.1},
    {"sequence_mask_max": 0.05},
    {"sequence_mask_max": 0.05, "kl": 0.1, "updates_per_step": 2},
    {"clip_dual": 1.5, "updates_per_step": 3, "proximal": "behaviour"},
]


@pytest.mark.parametrize("loss", SETTINGS, ids=str)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_gradient_of_each_chunk_is_that_of_the_whole(
    base: Path, monkeypatch: pytest.MonkeyPatch, loss: dict[str, Any], rank: int
) -> None:
    """The loss computed a few tokens at a time has the gradient of autograd over all logits."""

    def of(reference: str | None) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        policy = open_policy(base, rank)
        policy.keep_reference(base)
        policy.head = Head(policy.head.module, policy.head.tail, reference)
        optimizer = Optimizer(
            policy.parameters, OptimizerSettings(learning_rate=1e-5, gradient_norm_max=1e9, beta1=0.0)
        )
        batch = batch_of(1.0, -0.5, 2.0, 0.3)
        measured = train(policy, optimizer, batch, LossSettings(**loss), 30, threading.Event()).measured
        return {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}, measured

    (expected, chunked), how = of("to compare"), head.CHUNK_BYTES
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 5 * open_policy(base).vocabulary)
    chunk_gradients, chunk_measures = of(None)
    assert how != head.CHUNK_BYTES
    assert_equal(chunk_gradients, expected)
    for name in chunked.keys() - {"step_seconds", "tokens_per_second"}:
        assert chunk_measures[name] == pytest.approx(chunked[name], rel=1e-4, abs=1e-6), name


def test_a_zero_advantage_changes_nothing(base: Path) -> None:
    policy, measured = step(base, batch_of(0.0, 0.0))
    before = open_policy(base).tensors()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors().items())
    assert measured["gradient_norm"] == 0.0


def test_good_tokens_become_likelier_and_bad_ones_less_likely(base: Path) -> None:
    batch = batch_of(1.0, -1.0)
    before = [one_by_one(base, row).sum() for row in batch.rows]
    policy, _ = step(base, batch)
    after = [policy.logprobs(policy.collate([row]))[0].sum() for row in batch.rows]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("rank", [0, 4])
def test_p9_the_step_itself_repeats_bit_for_bit_on_the_cpu(base: Path, rank: int) -> None:
    batch = batch_of(1.0, -0.5, 2.0)
    first, second = (step(base, batch, pack_tokens=30, rank=rank)[0].tensors() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_several_updates_are_held_by_the_clip(base: Path) -> None:
    batch = batch_of(1.0, -1.0)
    _, first_result = step(base, batch, learning_rate=1e-3, updates_per_step=1)
    clipped, several = step(base, batch, learning_rate=1e-3, updates_per_step=8)
    free, _ = step(base, batch, learning_rate=1e-3, updates_per_step=8, clip_low=0.99, clip_high=1e9)
    assert first_result["clip_fraction"] == 0.0
    assert several["clip_fraction"] > 0.2

    def moved(policy: Policy) -> float:
        now = policy.logprobs(policy.collate([batch.rows[0]]))[0].detach()
        return float((now - one_by_one(base, batch.rows[0])).mean())

    assert 0 < moved(clipped) < moved(free)


def test_the_divergence_from_the_base_holds_the_weights_back(base: Path) -> None:
    batch = batch_of(2.0, -2.0)
    free = step(base, batch, learning_rate=1e-2, updates_per_step=6, clip_high=1e9)[0]
    tied, measured = step(base, batch, learning_rate=1e-2, updates_per_step=6, clip_high=1e9, kl=20.0)
    assert measured["kl_base"] > 0

    def distance(policy: Policy) -> float:
        now = policy.logprobs(policy.collate([batch.rows[0]]))[0].detach()
        return float((now - one_by_one(base, batch.rows[0])).abs().mean())

    assert distance(tied) < distance(free)


def test_an_adapter_is_its_own_reference(base: Path) -> None:
    policy, measured = step(base, batch_of(1.0, -1.0), rank=4, kl=0.1, updates_per_step=2)
    assert measured["kl_base"] >= 0
    pack = policy.collate(list(batch_of(1.0).rows))
    torch.testing.assert_close(
        policy.reference_logprobs(pack), one_by_one(base, batch_of(1.0).rows[0]), atol=2e-6, rtol=0
    )
    assert not torch.allclose(policy.logprobs(pack)[0], policy.reference_logprobs(pack), atol=1e-6)


def true_logprobs(base: Path, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the logprobs of the model in `base`, as if this model had sampled them."""
    logprobs = []
    for row in rows:
        behaviour = np.zeros_like(row.behaviour_T)
        behaviour[row.loss_mask_T] = one_by_one(base, row).numpy()
        logprobs.append(Row(**{**row.__dict__, "behaviour_T": behaviour}))
    return logprobs


def test_pitfall_6_engine_and_trainer_agree_on_their_own_samples(base: Path) -> None:
    rows = true_logprobs(base, batch_of(1.0, -1.0, 0.5).rows)
    _, measured = step(base, Batch(tuple(rows)))
    assert measured["mismatch_mean"] < 1e-5
    assert measured["mismatch_p99"] < 1e-4
    assert measured["mismatch_tokens"] == sum(row.loss_mask_T.sum() for row in rows)
    assert measured["kl_behaviour"] == pytest.approx(0.0, abs=1e-6)
    assert measured["weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert measured["truncated_fraction"] == measured["clip_fraction"] == 0.0


def test_pitfall_6_a_mismatch_is_measured(base: Path) -> None:
    rows = true_logprobs(base, batch_of(1.0, -1.0).rows)
    off = [Row(**{**row.__dict__, "behaviour_T": row.behaviour_T - 0.25 * row.loss_mask_T}) for row in rows]
    _, measured = step(base, Batch(tuple(off)))
    assert measured["mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
    assert measured["mismatch_p99"] == pytest.approx(0.25, abs=1e-4)
    assert measured["kl_behaviour"] == pytest.approx(np.exp(0.25) - 1 - 0.25, abs=1e-4)


def test_without_samples_of_these_weights_no_mismatch_is_claimed(base: Path) -> None:
    stale = Batch(tuple(Row.of(experience(n, V), 1.0, None) for n in range(2)))
    assert "mismatch_mean" not in step(base, stale)[1]


def test_a_stop_is_obeyed_between_passes(base: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        step(base, batch_of(1.0), stop=stop)


def test_a_gradient_that_is_not_finite_changes_nothing(base: Path) -> None:
    policy = open_policy(base)
    before = policy.tensors()
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    broken = Batch(tuple(Row(**{**row.__dict__, "advantage": np.float32("nan")}) for row in batch_of(1.0).rows))
    with pytest.raises(NotFinite):
        train(policy, optimizer, broken, LossSettings(), 4096, threading.Event())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors().items())
    assert optimizer.updates == 0
    result = train(policy, optimizer, batch_of(1.0), LossSettings(), 4096, threading.Event())
    assert result.measured["gradient_norm"] > 0


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


@pytest.mark.parametrize("loss", [{}, {"kl": 0.1}, {"sequence_mask_max": 0.05}, {"updates_per_step": 3}], ids=str)
def test_the_device_is_waited_for_once_an_update(
    base: Path, monkeypatch: pytest.MonkeyPatch, loss: dict[str, Any]
) -> None:
    policy, reads = open_policy(base), []
    policy.keep_reference(base)
    policy.logprobs(policy.collate(list(batch_of(1.0).rows)))  # what is found out about a model once
    policy.reference_logprobs(policy.collate(list(batch_of(1.0).rows)))
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    batch = batch_of(1.0, -0.5, 2.0, 0.3)

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any) -> Any:
            if tensor.requires_grad or tensor.numel() != len(batch.rows):  # not the batch's own numbers, on the host
                reads.append(name)
            return original(tensor, *args)

        return read

    def values(*args: Any) -> Any:
        monkeypatch.undo()
        return own_values(*args)

    own_values = Measures.values
    for name in READS:
        monkeypatch.setattr(Tensor, name, counting(name))
    monkeypatch.setattr(Measures, "values", values)
    train(policy, optimizer, batch, LossSettings(**loss), 30, threading.Event())
    monkeypatch.undo()
    assert reads == ["tolist"] * loss.get("updates_per_step", 1)


def test_the_gain_of_gradients_is_known_before_their_step(base: Path) -> None:
    """`clip_gradients` computes the scale before the second moments change, and the scale after the change is equal."""
    for kind in ("adamw", "muon"):
        policy = open_policy(base)
        settings = OptimizerSettings(kind=kind, learning_rate=1e-5, gradient_norm_max=0.5, warmup_updates=4)
        optimizer = Optimizer(policy.parameters, settings, policy.hidden)
        for seed, weight in enumerate((1.0, 0.25, 1.0)):
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in policy.parameters.items():
                parameter.grad = (
                    None if "norm" in name and seed == 0 else torch.randn(parameter.shape, generator=generator)
                )
            warmth, debt = optimizer._warmup_factor, optimizer._adam.gradient_gain(weight)
            norm, _ = optimizer.clip_gradients(weight)
            assert norm is not None
            expected = min(1.0, 0.5 / (norm + 1e-6)) * warmth * debt / optimizer._adam.scale
            assert optimizer.gain == pytest.approx(expected, rel=1e-6)
            optimizer.apply(weight)


def test_a_loss_that_asks_for_the_reference_gets_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference logprobs are computed for corrections, too, although the KL penalty ignores corrections."""
    seen: list[LossInputs] = []

    def compute(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        seen.append(sampled)
        return clipped_loss(sampled, settings)

    monkeypatch.setattr(LOSSES, "get", lambda _name: Loss(lambda: compute, Needs(reference=True)))
    policy = open_policy(base)
    policy.keep_reference(base)
    optimizer = Optimizer(policy.parameters, OptimizerSettings(learning_rate=1e-5))
    first = batch_of(1.0, -1.0).rows
    again = Row.of(experience(5, V, length=9), 0.5, V, 0.1)
    train(policy, optimizer, Batch((*first, again)), LossSettings(), 4096, threading.Event())
    assert {len(sampled.row_N) for sampled in seen} == {4, 9}
    for sampled in seen:
        assert sampled.reference_N is not None
        assert torch.allclose(sampled.reference_N, sampled.current_N.detach())
