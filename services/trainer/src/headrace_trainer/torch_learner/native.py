"""Whether we compute what the model itself computes: our logprobs beside those of transformers' own eager attention.

Our path packs sequences, keeps their attention apart and asks kernels of its own choice; the model's own code is asked
one sequence at a time. Architectures differ where short sequences do not show it: beyond a sliding window or a chunk,
beyond the context that a rotary embedding was made for, in a wide row. So the sequences reach there (`native_plan`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace_runtime import liveness
from headrace_runtime.errors import SettingError
from headrace_trainer.batches.batch import pack
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.model import forward
from headrace_trainer.torch_learner.model.configuration import architecture_of, config_of, said
from headrace_trainer.torch_learner.model.devices import device_of, resolved, weights_dtype
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy, from_folder
from headrace_trainer.torch_learner.native_plan import Plan, integers, plan

T = TypeVar("T")

_ROUTED_SHARE = 0.9
"""Where tokens go to experts, rounding alone sends a few to another one. This share of them has to agree."""
_COARSE = 100.0
"""Weights in bfloat16 round so coarsely that only means can be compared, with `difference_max` this many times."""


@dataclass(frozen=True)
class Compared:
    """What was found. `difference` is in nats, the largest of all places, and `place` says which; None when nothing was
    compared."""

    architecture: str
    difference: float | None
    place: str
    tokens: int
    unseen: tuple[str, ...]


class Native:
    """The model's own answers, kept until ours are there. The two are never in memory together."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        """Computes them. Blocks. Raises `SettingError` when the model cannot answer alone, or there is no room."""
        self._settings = settings
        config = config_of(folder)
        text = config.get_text_config()
        self._architecture = architecture_of(config)
        self._routed = any("expert" in name and count > 1 for name, count in integers(text.to_dict()))
        self._plan: Plan = plan(text, settings)
        compute = resolved(settings.compute, device_of(settings.compute.device))
        rounds = bool(settings.lora.rank) or compute.weights == "bfloat16"
        self._dtype = weights_dtype(compute, frozen=rounds)
        self._coarse = self._dtype is not torch.float32
        self._own_N = self._answers(folder) if self._plan.rows else None

    def compare(self, policy: Policy) -> Compared:
        """Ours beside the model's own. Raises `SettingError` where the policy answers otherwise."""
        if self._own_N is None:
            return Compared(self._architecture, None, "", 0, self._plan.unseen)
        difference, place = self._largest(self._ours(policy, self._own_N))
        bound = self._settings.native.difference_max
        if not difference <= bound * (_COARSE if self._coarse else 1.0):
            raise self._refused(
                f"answers otherwise than its own eager attention does, by {difference:.2g} nats {place}, "
                f"and trainer.native.difference_max is {bound:g}"
            )
        tokens = sum(row.length for row in self._plan.rows)
        return Compared(self._architecture, difference, place, tokens, self._plan.unseen)

    @torch.no_grad()
    def _answers(self, folder: Path) -> Tensor:
        device = device_of(self._settings.compute.device)
        model = from_folder(folder, self._dtype, "eager").to(device).eval()

        def answers() -> Tensor:
            return torch.cat([_alone(model, row.token_ids_T, row.loss_mask_T, device) for row in self._plan.rows]).cpu()

        try:
            return self._in_memory(answers)
        except SettingError:
            raise
        except Exception as error:  # whatever a model's code does
            remedy = f"{self._architecture} does not compute with its own eager attention: {said(error)}"
            raise SettingError("trainer.base", self._settings.base, remedy) from error

    @torch.no_grad()
    def _ours(self, policy: Policy, own_N: Tensor) -> Tensor:
        """Differences, in the order of the plan's rows; packed as a step would."""
        rows, parts = self._plan.rows, torch.split(own_N, [int(row.loss_mask_T.sum()) for row in self._plan.rows])
        difference: dict[int, Tensor] = {}
        try:
            for indices in pack([row.length for row in rows], self._settings.compute.pack_tokens):
                one = policy.collate([rows[index] for index in indices])
                ours_N = self._in_memory(partial(_logprobs, policy, one))
                kept = torch.split(ours_N.cpu(), [len(parts[index]) for index in indices])
                difference |= {i: (ours - parts[i]).abs() for i, ours in zip(indices, kept, strict=True)}
        except SettingError:
            raise
        except Exception as error:  # whatever a model's code does with attention that is not its own
            raise self._refused(f"does not compute: {said(error)}") from error
        return torch.cat([difference[index] for index in range(len(rows))])

    def _largest(self, difference_N: Tensor) -> tuple[float, str]:
        """Of all places, and which."""
        places = {place: difference_N[torch.from_numpy(at_N)] for place, at_N in self._plan.places.items()}
        found = [(self._one(each_N), place) for place, each_N in places.items() if len(each_N)]
        return max(found, key=lambda one: math.inf if math.isnan(one[0]) else one[0])

    def _one(self, difference_N: Tensor) -> float:
        if self._coarse:
            return float(difference_N.mean())
        return float(difference_N.quantile(_ROUTED_SHARE) if self._routed else difference_N.max())

    def _refused(self, why: str) -> SettingError:
        if self._settings.compute.packing == "blocks":
            name, value, remedy = "trainer.compute.packing", "blocks", 'set "padded"'
        else:
            name, value, remedy = "trainer.base", self._settings.base, "train another base"
        return SettingError(name, value, f"{self._architecture} {why}; {remedy}")

    def _in_memory(self, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            remedy = f"{self._architecture} runs out of memory in so long a comparison: {said(error)}; lower it"
            raise SettingError("trainer.native.tokens", self._settings.native.tokens, remedy) from error


def examine(settings: TrainerSettings) -> Compared:
    """The comparison by itself, of the base folder, on the CPU. Blocks. Raises `SettingError`."""
    on_cpu = settings.model_copy(update={"compute": settings.compute.model_copy(update={"device": "cpu"})})
    folder = Path(settings.base)
    native = Native(folder, on_cpu)
    return native.compare(Policy.open(folder, on_cpu.compute, on_cpu.lora, on_cpu.seed))


def _logprobs(policy: Policy, one: Pack) -> Tensor:
    """Without autocast: what differs shall not hide in the rounding of a coarser type."""
    with policy.eagerly():
        return forward.logprobs(policy.model, policy.head, one)[0]


def _alone(model: Any, token_ids_T: Any, loss_mask_T: Any, device: torch.device) -> Tensor:
    """Logprobs of one sequence, all of it in one pass, where the mask is set."""
    liveness.progress()
    ids_T = torch.from_numpy(token_ids_T).long().to(device)
    targets_N = torch.from_numpy(loss_mask_T).nonzero().flatten().to(device)
    inputs = {"input_ids": ids_T[None], "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits_NV = model(**inputs, logits_to_keep=targets_N - 1).logits[0]
    else:
        logits_NV = model(**inputs).logits[0, targets_N - 1]
    logprobs_NV: Tensor = logits_NV.float().log_softmax(-1)
    return logprobs_NV.gather(-1, ids_T[targets_N, None]).squeeze(-1)
