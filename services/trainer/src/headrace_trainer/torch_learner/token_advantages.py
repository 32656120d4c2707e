"""Estimators of the advantages of single tokens: the critic and the teacher.

The critic predicts the reward at each sampled token, for advantages by GAE. The value of a token
is a linear map of the policy's last hidden state before it. No gradient of it reaches the policy, and its optimizer is
its own. Formulas are in `headrace_trainer.algorithms.catalog.clipped_ratios`.

The teacher is another model that grades the sampled tokens. The advantage of a token is the teacher's logprob minus the
engine's (`headrace_trainer.algorithms.catalog.imitation`). It is a model's folder, loaded next to the policy, or an
endpoint of OpenAI's completions API that takes token ids and returns `prompt_logprobs`, as vLLM's does. An endpoint
computes logprobs at temperature 1 over all tokens, so tokens that were sampled at another temperature, or from a part
of the vocabulary, have no advantage then.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.settings import CriticSettings, TeacherSettings
from headrace_trainer.learner import Abandoned, LearnerLost
from headrace_trainer.settings import LoraSettings, TrainerSettings
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

Floats = NDArray[np.float64]


def gae(values_T: Floats, reward: float, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Compute generalized advantage estimates (GAE) of one sequence, whose reward follows its last token.

    Args:
        values_T: the critic's value before each token.
        reward: the reward.
        gamma: discount of the reward per token.
        lam: the parameter λ of GAE.

    Returns:
        The advantages and the returns, `(advantages_T, returns_T)`.
    """
    advantages_T, following, next_value = np.zeros_like(values_T), 0.0, 0.0
    for index in range(len(values_T) - 1, -1, -1):
        earned = reward if index == len(values_T) - 1 else 0.0
        following = earned + gamma * next_value - values_T[index] + gamma * lam * following
        advantages_T[index], next_value = following, values_T[index]
    return advantages_T, advantages_T + values_T


def reward_weights(tokens: int, gamma: float, lam: float) -> Floats:
    """Return the weight of the final reward in the GAE advantage of each token: (gamma * lam) ** (tokens after it)."""
    return np.power(gamma * lam, np.arange(tokens - 1, -1, -1, dtype=np.float64))


class Critic:
    """Learned linear model of the expected reward at each token, from which advantages of tokens are computed.

    Its weights are initially 0, so it draws no random numbers.
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
        """Compute the advantages of a forward pass, and add its part of the gradient of the critic's loss.

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
            reward_shares = reward_weights(len(tokens), settings.gamma, settings.lam)
            self._advantages[name] = float(row_advantages.sum() / reward_shares.sum())
        errors_N = values_N - torch.from_numpy(returns).to(values_N)
        loss = 0.5 * (errors_N**2).sum() / count
        loss.backward()
        return torch.from_numpy(advantages).to(pack.advantage_N), float(((values - returns) ** 2).sum() / count)

    def _discount_correction(self, pack: Pack) -> Pack:
        """Return a pass of corrections with the advantages of single tokens, by discounting the change of the reward
        from the last token backwards.
        """
        rows = pack.row_N.cpu().numpy()
        reward_shares = np.zeros(len(rows))
        for index in range(len(pack.names)):
            tokens = np.flatnonzero(rows == index)
            reward_shares[tokens] = reward_weights(len(tokens), self._settings.gamma, self._settings.lam)
        return replace(pack, advantage_N=pack.advantage_N * torch.from_numpy(reward_shares).to(pack.advantage_N))


class TokenAdvantageEstimator(Protocol):
    """Interface of estimators that compute the advantages of single tokens in each step, before the weights change.

    Implementations are `Critic`, `Teacher` and `HindsightTeacher`. Their state is saved with that of the optimizer.
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
        """Train the estimator itself (for example a critic) by one step, after the step of the policy.

        Returns:
            The advantages that it estimated for this step, by the name of the row, as `StepResult.advantages` holds
            them. Estimators that are not trained themselves, such as teacher models, return an empty mapping.
        """

    def state(self) -> dict[str, Tensor]:
        """Return copies of the estimator's tensors on the CPU, to be saved and given to `load` later."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned. An empty state resets the estimator."""


_ATTEMPTS = 5
"""Attempts at a sequence before the process ends, to be started again."""
_PAUSE_S = 1.0


class _ScorePack(Protocol):
    def __call__(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Return the teacher model's logprob of each loss token (`logprobs_N`), and which of them are valid
        (`usable_N`).
        """


class Teacher:
    """`TokenAdvantageEstimator` that compares the engine's logprobs with those of another model. It has no state."""

    def __init__(self, answers: _ScorePack, coefficient: float) -> None:
        self._score = answers
        self._coefficient = coefficient
        self._measured: dict[str, float] = {}

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def estimate(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        estimated, differences = [], []
        for pack in first:
            if stop.is_set():
                raise Abandoned
            logprobs_N, usable_N = self._score(pack)
            difference_N = (logprobs_N - pack.behaviour_N).where(usable_N, 0.0)
            differences.append(difference_N)
            estimated.append(replace(pack, advantage_N=pack.advantage_N * self._coefficient * difference_N))
        if differences:
            self._measured = {"teacher_gap": float(-torch.cat(differences).double().mean())}
        return estimated, list(corrections)

    def learn(self) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing, because there is no state."""


def open_teacher(policy: Policy, settings: TrainerSettings) -> Teacher:
    """Open the teacher that `[trainer.teacher]` names. Raises `SettingError`."""
    teacher = settings.teacher
    if teacher.model.startswith(("http://", "https://")):
        return Teacher(TeacherEndpoint(teacher), teacher.coefficient)
    compute = settings.compute.model_copy(update={"gradient_checkpointing": False, "weights": "float32"})
    folder = Path(teacher.model)
    if not folder.is_dir():
        raise SettingError(
            "trainer.teacher.model", teacher.model, "is neither a folder nor an endpoint's address; name one"
        )
    other = Policy.open(folder, compute, LoraSettings(), settings.seed)
    other.model.requires_grad_(False).eval()
    if other.vocabulary != policy.vocabulary:
        remedy = (
            f"has {other.vocabulary} token ids, and trainer.base {policy.vocabulary}; a teacher needs the same ones"
        )
        raise SettingError("trainer.teacher.model", teacher.model, remedy)

    @torch.no_grad()
    def score(pack: Pack) -> tuple[Tensor, Tensor]:
        logprobs_N = other.logprobs(pack)[0]
        return logprobs_N, torch.ones_like(logprobs_N, dtype=torch.bool)

    return Teacher(score, teacher.coefficient)


class TeacherEndpoint:
    """Client of an endpoint that scores one sequence at a time; its server batches them. Blocks."""

    def __init__(self, settings: TeacherSettings) -> None:
        self._settings = settings

    def __call__(self, pack: Pack) -> tuple[Tensor, Tensor]:
        token_logprobs: list[float] = []
        for token_ids, positions in _sequences(pack):
            logprobs = self._logprobs(token_ids)
            token_logprobs += [logprobs[position] for position in positions]
        usable_N = pack.temperature_N == 1.0
        if pack.sets is not None:
            usable_N = usable_N & ~pack.sets.restricted_N
        return torch.tensor(token_logprobs).to(pack.behaviour_N), usable_N

    def _logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the teacher model's logprob of each token of the sequence, 0 for the first one.

        Raises:
            LearnerLost: the endpoint cannot be used.
        """
        options = {"prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._post({"model": self._settings.name, **options})
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [
                0.0 if entry is None else float(entry[str(token)]["logprob"])
                for entry, token in zip(entries, token_ids, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LearnerLost(f"{self._setting} does not return prompt_logprobs for token ids: {error!r}") from None

    def _post(self, body: Mapping[str, Any]) -> Any:
        settings = self._settings
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings.key.get_secret_value()}"}
        url, data = f"{settings.model.rstrip('/')}/v1/completions", json.dumps(body).encode()
        for attempt in range(1, _ATTEMPTS + 1):
            request = urllib.request.Request(url, data, headers)  # noqa: S310 (a setting, http or https)
            try:
                with _DIRECT.open(request, timeout=settings.timeout_s) as answer:
                    return json.load(answer)
            except (OSError, ValueError, RecursionError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or attempt == _ATTEMPTS:
                    raise LearnerLost(f"{self._setting} cannot be reached: {error}") from None
                time.sleep(_PAUSE_S * attempt)
        raise AssertionError("attempts is at least 1")

    @property
    def _setting(self) -> str:
        return f"trainer.teacher.model = {self._settings.model!r}"


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener without the environment's proxies, because the request carries the key of an inference server."""


def _sequences(pack: Pack) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of each row, and the positions of its loss tokens."""
    width = pack.token_ids_BT.shape[1]
    flat, rows, targets = pack.token_ids_BT.flatten().tolist(), pack.row_N.tolist(), (pack.predicting_N + 1).tolist()
    for index in range(len(pack.names)):
        start, end = (index * width, (index + 1) * width) if not pack.bounds else pack.bounds[index : index + 2]
        positions = [target - start for target, row in zip(targets, rows, strict=True) if row == index]
        yield flat[start:end][: max(positions) + 1], positions
