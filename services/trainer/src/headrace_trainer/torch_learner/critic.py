"""A critic: how much reward is to be expected from here, for each sampled token, and advantages from that (GAE).

The value of a token is a linear map of the policy's last hidden state before it. No gradient of it reaches the policy,
and its optimizer is its own. Formulas are in `headrace_trainer.algorithms.catalog.ppo`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace_trainer.learner import Abandoned
from headrace_trainer.settings import CriticSettings
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

Floats = NDArray[np.float64]


def gae(values_T: Floats, reward: float, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """`(advantages_T, returns_T)` of one sequence whose reward comes with its last token."""
    advantages_T, following, next_value = np.zeros_like(values_T), 0.0, 0.0
    for place in range(len(values_T) - 1, -1, -1):
        earned = reward if place == len(values_T) - 1 else 0.0
        following = earned + gamma * next_value - values_T[place] + gamma * lam * following
        advantages_T[place], next_value = following, values_T[place]
    return advantages_T, advantages_T + values_T


def shares(tokens: int, gamma: float, lam: float) -> Floats:
    """What the reward at the end counts in the advantage of each token."""
    return np.power(gamma * lam, np.arange(tokens - 1, -1, -1, dtype=np.float64))


class Critic:
    """An `Appraiser`. Nothing of it is drawn at random: it begins with a value of 0 everywhere."""

    def __init__(self, width: int, settings: CriticSettings, device: torch.device) -> None:
        self._settings = settings
        # Its usual beginning would be drawn, and move the random numbers that are saved.
        self.head = nn.Linear(width, 1, device="meta", dtype=torch.float32).to_empty(device=device)
        self._optimizer = self._begin()
        self._advantages: dict[str, float] = {}
        self._measured: dict[str, float] = {}

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def appraise(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        self._advantages, self._measured = {}, {}
        self.head.zero_grad()
        count = sum(len(one.targets_N) for one in first)
        found, errors = [], 0.0
        for one in first:
            if stop.is_set():
                raise Abandoned
            advantage_N, error = self._of(policy, one, count)
            errors += error
            found.append(replace(one, advantage_N=advantage_N))
        if count:
            self._measured = {"critic_loss": errors / 2}
        return found, [self._shared(one) for one in corrections]

    def learn(self) -> Mapping[str, float]:
        gradients = [parameter.grad for parameter in self.head.parameters() if parameter.grad is not None]
        if gradients and all(bool(gradient.isfinite().all()) for gradient in gradients):
            self._optimizer.step()
        return self._advantages

    def state(self) -> dict[str, Tensor]:
        found = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        for name, parameter in self.head.named_parameters():
            for what, value in self._optimizer.state.get(parameter, {}).items():
                found[f"{name}/{what}"] = value.detach().cpu().clone()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer = self._begin()
        if not state:
            return
        self.head.load_state_dict({name: value for name, value in state.items() if "/" not in name})
        for key, value in state.items():
            name, _, what = key.rpartition("/")
            if name:
                parameter = self.head.get_parameter(name)
                self._optimizer.state[parameter][what] = value.clone() if what == "step" else value.to(parameter.device)

    def _begin(self) -> torch.optim.AdamW:
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        return torch.optim.AdamW(self.head.parameters(), lr=self._settings.learning_rate, weight_decay=0.0)

    def _of(self, policy: Policy, one: Pack, count: int) -> tuple[Tensor, float]:
        """The advantages of a pass, with the gradient of its part of the critic's loss; and its part of the error."""
        settings, hidden_NH = self._settings, policy.hidden_states(one)
        values_N = self.head(hidden_NH).squeeze(-1)
        values, rewards = values_N.detach().double().cpu().numpy(), one.advantage_N.double().cpu().numpy()
        rows = one.row_N.cpu().numpy()
        advantages, returns = np.zeros_like(values), np.zeros_like(values)
        for index, name in enumerate(one.names):
            place = np.flatnonzero(rows == index)
            found = gae(values[place], float(rewards[place[-1]]), settings.gamma, settings.lam)
            advantages[place], returns[place] = found
            reached = shares(len(place), settings.gamma, settings.lam)
            self._advantages[name] = float(found[0].sum() / reached.sum())
        errors_N = values_N - torch.from_numpy(returns).to(values_N)
        loss = 0.5 * (errors_N**2).sum() / count
        loss.backward()
        return torch.from_numpy(advantages).to(one.advantage_N), float(((values - returns) ** 2).sum() / count)

    def _shared(self, one: Pack) -> Pack:
        """A correction of the reward, as far as it reaches each token."""
        rows = one.row_N.cpu().numpy()
        reached = np.zeros(len(rows))
        for index in range(len(one.names)):
            place = np.flatnonzero(rows == index)
            reached[place] = shares(len(place), self._settings.gamma, self._settings.lam)
        return replace(one, advantage_N=one.advantage_N * torch.from_numpy(reached).to(one.advantage_N))
