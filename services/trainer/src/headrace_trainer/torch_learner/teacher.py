"""A teacher: another model that says how likely each sampled token is. The advantage of a token is what it would have
given it beyond what the engine did (`headrace_trainer.algorithms.catalog.on_policy_distill`).

It is a model's folder, loaded beside the policy, or an endpoint of OpenAI's completions API that takes token ids and
answers `prompt_logprobs`, as vLLM's does. An endpoint answers at temperature 1: tokens that were sampled at another one
have no advantage then.
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

_PAUSE_S = 1.0


class _Answers(Protocol):
    def __call__(self, one: Pack) -> tuple[Tensor, Tensor]:
        """`(logprobs_N, known_N)`."""


class Teacher:
    """An `Appraiser` without a state."""

    def __init__(self, answers: _Answers, coefficient: float) -> None:
        self._answers = answers
        self._coefficient = coefficient
        self._measured: dict[str, float] = {}

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def appraise(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        found, differences = [], []
        for one in first:
            if stop.is_set():
                raise Abandoned
            logprobs_N, known_N = self._answers(one)
            difference_N = (logprobs_N - one.behaviour_N).where(known_N, 0.0)
            differences.append(difference_N)
            found.append(replace(one, advantage_N=one.advantage_N * self._coefficient * difference_N))
        if differences:
            self._measured = {"teacher_gap": float(-torch.cat(differences).double().mean())}
        return found, list(corrections)

    def learn(self) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing to continue."""


def of(policy: Policy, settings: TrainerSettings) -> Teacher:
    """What `[trainer.teacher]` names. Raises `SettingError`."""
    given = settings.teacher
    if given.model.startswith(("http://", "https://")):
        return Teacher(TeacherEndpoint(given), given.coefficient)
    compute = settings.compute.model_copy(update={"gradient_checkpointing": False, "weights": "float32"})
    folder = Path(given.model)
    if not folder.is_dir():
        raise SettingError("trainer.teacher.model", given.model, "is neither a folder nor the address of an endpoint")
    other = Policy.open(folder, compute, LoraSettings(), settings.seed)
    other.model.requires_grad_(False).eval()
    if other.vocabulary != policy.vocabulary:
        remedy = (
            f"has {other.vocabulary} token ids, and trainer.base {policy.vocabulary}; a teacher needs the same ones"
        )
        raise SettingError("trainer.teacher.model", given.model, remedy)

    @torch.no_grad()
    def answers(one: Pack) -> tuple[Tensor, Tensor]:
        logprobs_N = other.logprobs(one)[0]
        return logprobs_N, torch.ones_like(logprobs_N, dtype=torch.bool)

    return Teacher(answers, given.coefficient)


class TeacherEndpoint:
    """Asks about one sequence at a time; whoever serves it batches. Blocks."""

    def __init__(self, settings: TeacherSettings) -> None:
        self._settings = settings

    def __call__(self, one: Pack) -> tuple[Tensor, Tensor]:
        found: list[float] = []
        for token_ids, places in _sequences(one):
            logprobs = self._logprobs(token_ids)
            found += [logprobs[place] for place in places]
        return torch.tensor(found).to(one.behaviour_N), one.temperature_N == 1.0

    def _logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token of the sequence; of the first one 0. Raises `LearnerLost`."""
        asked = {"prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._post({"model": self._settings.name, **asked})
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            found = [0.0 if each is None else float(each[str(token)]["logprob"])
                     for each, token in zip(given, token_ids, strict=True)]  # fmt: skip
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LearnerLost(f"{self._what} does not answer prompt_logprobs for token ids: {error!r}") from None
        return found

    def _post(self, body: Mapping[str, Any]) -> Any:
        settings = self._settings
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings.key.get_secret_value()}"}
        url, data = f"{settings.model.rstrip('/')}/v1/completions", json.dumps(body).encode()
        for attempt in range(1, settings.attempts + 1):
            request = urllib.request.Request(url, data, headers)  # noqa: S310 (a setting, http or https)
            try:
                with _DIRECT.open(request, timeout=settings.timeout_s) as answer:
                    return json.load(answer)
            except (OSError, ValueError, RecursionError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or attempt == settings.attempts:
                    raise LearnerLost(f"{self._what} cannot be asked: {error}") from None
                time.sleep(_PAUSE_S * attempt)
        raise AssertionError("attempts is at least 1")

    @property
    def _what(self) -> str:
        return f"trainer.teacher.model = {self._settings.model!r}"


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past the proxies of the environment: a teacher is an inference server of ours, and gets its key."""


def _sequences(one: Pack) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of each row, and the places of its loss tokens."""
    width = one.token_ids_BT.shape[1]
    flat, rows, targets = one.token_ids_BT.flatten().tolist(), one.row_N.tolist(), (one.predicting_N + 1).tolist()
    for index in range(len(one.names)):
        start, end = (index * width, (index + 1) * width) if not one.bounds else one.bounds[index : index + 2]
        places = [place - start for place, row in zip(targets, rows, strict=True) if row == index]
        yield flat[start:end][: max(places) + 1], places
