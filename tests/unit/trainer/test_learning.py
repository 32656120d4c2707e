"""The whole path from rewards to weights, with its sign: a bandit that has to learn.

Each run is one prompt and one sampled token; half of the vocabulary is rewarded. A flipped sign anywhere between reward
and weights makes the rewarded tokens less likely, and the check fails.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_schemas import Branch, Experience, Span
from headrace_trainer.algorithms import advantages, loss
from headrace_trainer.algorithms.loss import TokenLoss, token_loss
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from tests.support.torch_learners import policy_of
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import START, VOCABULARY, World, experience

PROMPT = (11, 7, 19, 3)
RUNS = 48
STEPS = 8


class Bandit:
    """Plays the lineage's own policy."""

    def __init__(self, world: World, settings: Any) -> None:
        self.world = world
        self.lineage: Lineage = open_lineage(settings, world.blobs, world.clock)
        self._version = self.lineage.state.history.head
        self._draw = torch.Generator().manual_seed(3)
        self._number = 0

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        logprobs: torch.Tensor = policy_of(self.lineage).model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        return logprobs

    def success(self) -> float:
        """Probability of a rewarded token, exactly."""
        return float(self.logprobs().exp()[: VOCABULARY // 2].sum())

    def play(self, task: str | None) -> Experience:
        logprobs_V = self.logprobs()
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=self._draw))
        span = Span(
            start=len(PROMPT),
            logprobs=(float(logprobs_V[token]),),
            turn_id=f"turn-{self._number}",
            version=self._version,
        )
        self._number += 1
        event = experience(self._number, self._version, reward=float(token < VOCABULARY // 2), task=task)
        branch = Branch(token_ids=(*PROMPT, token), spans=(span,))
        return event.model_copy(update={"branch": branch, "run_id": str(self._number)})

    def learn(self) -> list[float]:
        """Success before, and after each step."""
        rates = [self.success()]
        grouped = self.lineage._settings.grouped
        for _ in range(STEPS):
            for run in range(RUNS):
                task = f"t{run // 8}" if grouped else None
                self.lineage.state.admit(self.play(task), (0, self._number), START)
            batch = self.lineage.next_batch()
            assert len(batch) == RUNS
            self.lineage.step(batch, threading.Event())
            rates.append(self.success())
        return rates


def check_learns(folder: Path, make: Make, margin: float = 0.25, **overrides: Any) -> None:
    settings = {
        "batch_experiences": RUNS,
        "optimizer": {"learning_rate": 2e-2},
        **overrides,
    }
    success = Bandit(World(folder), make(**settings)).learn()
    print("success", [round(value, 3) for value in success])
    assert success[-1] > success[0] + margin, "it must learn upwards"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        pytest.param({"optimizer": {"kind": "muon", "learning_rate": 2e-2}}, marks=pytest.mark.long),
        {"advantage": {"kind": "grpo"}, "group_size": 8},
        pytest.param({"advantage": {"kind": "rloo"}, "group_size": 8}, marks=pytest.mark.long),
        pytest.param(
            {
                "advantage": {"scale": "none"},
                "loss": {"proximal": "behaviour", "updates_per_step": 2, "clip_dual": 3.0},
            },
            marks=pytest.mark.long,
        ),
        pytest.param({"loss": {"kl": 0.01}}, marks=pytest.mark.long),
        pytest.param({"compute": {"packing": "padded", "pack_tokens": 64}}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_it_learns_upwards(tmp_path: Path, make: Make, overrides: dict[str, Any]) -> None:
    check_learns(tmp_path, make, **overrides)


@pytest.mark.long
def test_adapters_learn_upwards(tmp_path: Path, make: Make) -> None:
    """Adapters learn as far as they can: without the embeddings, which are also the output head, one layer of random
    weights can bring success from 0.501 to 0.512 and no further."""
    check_learns(tmp_path, make, margin=0.01, lora={"rank": 4}, optimizer={"learning_rate": 3e-3})


@pytest.mark.long
def test_a_flipped_sign_in_the_loss_is_caught(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(*tensors: Any) -> TokenLoss:
        losses = token_loss(*tensors)
        return dataclasses.replace(losses, loss_N=-losses.loss_N)

    monkeypatch.setattr(loss, "token_loss", flipped)
    with pytest.raises(AssertionError, match="learn upwards"):
        check_learns(tmp_path, make)


@pytest.mark.long
def test_a_flipped_sign_in_the_advantage_is_caught(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of = advantages.Advantages.of

    def flipped(_cls: type, rewards_B: Any, baselines_B: Any, scales_B: Any) -> advantages.Advantages:
        return of(rewards_B, baselines_B, [-scale for scale in scales_B])

    monkeypatch.setattr(advantages.Advantages, "of", classmethod(flipped))
    with pytest.raises(AssertionError, match="learn upwards"):
        check_learns(tmp_path, make)


def test_pitfall_12_two_tasks_with_constant_rewards_leave_the_weights_alone(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    settings = make(batch_experiences=4)
    lineage = open_lineage(settings, world.blobs, world.clock)
    version, before = lineage.state.history.head, policy_of(lineage).tensors()
    norms = []
    for turn in range(4):
        for n in range(4):
            task, reward = (("easy", 1.0), ("hard", 0.2))[n % 2]
            lineage.state.admit(experience(10 * turn + n, version, reward, task=task), (0, n), START)
        norms.append(lineage.step(lineage.next_batch(), threading.Event())["gradient_norm"])
    assert norms == pytest.approx([0.0] * 4, abs=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy_of(lineage).tensors().items())
