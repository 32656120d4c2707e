"""Estimators of the advantages of single tokens, and the critic: a model that predicts the reward at each sampled
token, for advantages by GAE.

The value of a token is a linear map of the policy's last hidden state before it. No gradient of it reaches the policy,
and its optimizer is its own. Formulas are in `headrace_trainer.algorithms.catalog.ppo`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace_trainer.algorithms.settings import CriticSettings
from headrace_trainer.learner import Abandoned
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

Floats = NDArray[np.float64]


def gae(values_T: Floats, reward: float, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Compute generalized advantage estimates for one sequence, whose reward comes with its last token.

    Args:
        values_T: the critic's value before each token.

    Returns:
        The advantages and the returns, `(advantages_T, returns_T)`.
    """
    advantages_T, following, next_value = np.zeros_like(values_T), 0.0, 0.0
    for index in range(len(values_T) - 1, -1, -1):
        earned = reward if index == len(values_T) - 1 else 0.0
        following = earned + gamma * next_value - values_T[index] + gamma * lam * following
        advantages_T[index], next_value = following, values_T[index]
    return advantages_T, advantages_T + values_T


def shares(tokens: int, gamma: float, lam: float) -> Floats:
    """Return the weight of the final reward in the advantage of each of `tokens` tokens."""
    return np.power(gamma * lam, np.arange(tokens - 1, -1, -1, dtype=np.float64))


class Critic:
    """`TokenAdvantageEstimator` that learns the expected reward at each token.

    It is 0 everywhere at first, and draws no random numbers.
    """

    def __init__(self, width: int, settings: CriticSettings, device: torch.device) -> None:
        self._settings = settings
        # The usual initialisation would draw random numbers, and so change the saved random state.
        self.head = nn.Linear(width, 1, device="meta", dtype=torch.float32).to_empty(device=device)
        self._optimizer = self._reset()
        self._advantages: dict[str, float] = {}
        self._measured: dict[str, float] = {}

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def estimate(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        self._advantages, self._measured = {}, {}
        self.head.zero_grad()
        count = sum(len(pack.targets_N) for pack in first)
        estimated, errors = [], 0.0
        for pack in first:
            if stop.is_set():
                raise Abandoned
            advantage_N, error = self._estimate_pack(policy, pack, count)
            errors += error
            estimated.append(replace(pack, advantage_N=advantage_N))
        if count:
            self._measured = {"critic_loss": errors / 2}
        return estimated, [self._discount_correction(pack) for pack in corrections]

    def learn(self) -> Mapping[str, float]:
        gradients = [parameter.grad for parameter in self.head.parameters() if parameter.grad is not None]
        if gradients and all(bool(gradient.isfinite().all()) for gradient in gradients):
            self._optimizer.step()
        return self._advantages

    def state(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        for name, parameter in self.head.named_parameters():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{kind}"] = value.detach().cpu().clone()
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer = self._reset()
        if not state:
            return
        self.head.load_state_dict({name: value for name, value in state.items() if "/" not in name})
        for key, value in state.items():
            name, _, kind = key.rpartition("/")
            if name:
                parameter = self.head.get_parameter(name)
                self._optimizer.state[parameter][kind] = value.clone() if kind == "step" else value.to(parameter.device)

    def _reset(self) -> torch.optim.AdamW:
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        return torch.optim.AdamW(self.head.parameters(), lr=self._settings.learning_rate, weight_decay=0.0)

    def _estimate_pack(self, policy: Policy, pack: Pack, count: int) -> tuple[Tensor, float]:
        """Compute the advantages of a forward pass, and add the gradient of its part of the critic's loss.

        Returns:
            The advantages, and the pass's part of the squared error.
        """
        settings, hidden_NH = self._settings, policy.hidden_states(pack)
        values_N = self.head(hidden_NH).squeeze(-1)
        values, rewards = values_N.detach().double().cpu().numpy(), pack.advantage_N.double().cpu().numpy()
        rows = pack.row_N.cpu().numpy()
        advantages, returns = np.zeros_like(values), np.zeros_like(values)
        for index, name in enumerate(pack.names):
            tokens = np.flatnonzero(rows == index)
            row_advantages, row_returns = gae(values[tokens], float(rewards[tokens[-1]]), settings.gamma, settings.lam)
            advantages[tokens], returns[tokens] = row_advantages, row_returns
            reward_shares = shares(len(tokens), settings.gamma, settings.lam)
            self._advantages[name] = float(row_advantages.sum() / reward_shares.sum())
        errors_N = values_N - torch.from_numpy(returns).to(values_N)
        loss = 0.5 * (errors_N**2).sum() / count
        loss.backward()
        return torch.from_numpy(advantages).to(pack.advantage_N), float(((values - returns) ** 2).sum() / count)

    def _discount_correction(self, pack: Pack) -> Pack:
        """Return a correction of the reward with its advantage discounted for each token."""
        rows = pack.row_N.cpu().numpy()
        reward_shares = np.zeros(len(rows))
        for index in range(len(pack.names)):
            tokens = np.flatnonzero(rows == index)
            reward_shares[tokens] = shares(len(tokens), self._settings.gamma, self._settings.lam)
        return replace(pack, advantage_N=pack.advantage_N * torch.from_numpy(reward_shares).to(pack.advantage_N))


class TokenAdvantageEstimator(Protocol):
    """Interface of a computation of the advantages of single tokens, once per step before the weights change.

    Implementations are a critic, a teacher model and the hindsight teacher.

    Its state is saved with that of the optimizer.
    """

    @property
    def measured(self) -> Mapping[str, float]:
        """Measurements of the last step."""

    def estimate(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        """Return the forward passes of first trainings and of corrections with `advantage_N` set.

        It may add passes of its own, whose rows have no name and no weight. Raises `Abandoned` soon after
        `stop` is set.
        """

    def learn(self) -> Mapping[str, float]:
        """Train the estimator after a step was taken. Return the advantages for `StepResult.advantages`."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state on the CPU."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state; an empty one resets the estimator."""
