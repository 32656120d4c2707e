"""A teacher: another model that grades the sampled tokens. The advantage of a token is the teacher's logprob minus the
engine's (`headrace_trainer.algorithms.catalog.on_policy_distill`).

The teacher is a model's folder, loaded next to the policy, or an endpoint of OpenAI's completions API that takes token
ids and returns `prompt_logprobs`, as vLLM's does. An endpoint computes logprobs at temperature 1 over all tokens, so
tokens that were sampled at another temperature, or from a part of the vocabulary, have no advantage then.
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

import torch
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_trainer.learner import Abandoned, LearnerLost
from headrace_trainer.settings import LoraSettings, TeacherSettings, TrainerSettings
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

_ATTEMPTS = 5
"""Attempts at a sequence before the process ends, to be started again."""
_PAUSE_S = 1.0


class _ScorePack(Protocol):
    def __call__(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Return the teacher's logprobs, `logprobs_N`, and whether each is usable, `usable_N`."""


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
        """Return the logprob of each token of the sequence; 0 for the first one. Raises `LearnerLost`."""
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
