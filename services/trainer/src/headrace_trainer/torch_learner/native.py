"""Compares the trainer's logprobs with those of transformers' own eager attention, on sequences chosen within a budget
of tokens.

The trainer packs sequences, separates their attention and chooses its own kernels; the model's own code computes one
sequence at a time. Architectures can differ only in long sequences: beyond a sliding window or a chunk, beyond the
context that a rotary embedding was made for, in a wide row. So `plan_comparison` chooses sequences that reach
there.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_runtime.process import liveness
from headrace_trainer.batches.batch import Row, pack
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import PACK_TOKENS
from headrace_trainer.torch_learner.model import forward
from headrace_trainer.torch_learner.model.configuration import architecture_of, config_of, first_line
from headrace_trainer.torch_learner.model.devices import device_of, resolve_types, weights_dtype
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy, from_folder
from headrace_trainer.torch_learner.model.sequence_bound import context_of
from headrace_trainer.torch_learner.tensors import is_out_of_memory

_PLAIN = (24, 57, 200)
"""Lengths of sequences that every model gets, in tokens."""
_BEYOND = 33
"""Number of tokens by which a sequence exceeds a length at which a model changes."""
_HEAD = 64
_LENGTHS = re.compile(r"window|chunk|block_size|original_max_position|floor_scale")
"""Settings of transformers' configurations that hold such a length."""
T = TypeVar("T")

_ROUTED_SHARE = 0.9
"""Share of tokens that must agree where tokens go to experts, because rounding sends a few to another expert."""
_COARSE = 100.0
"""Factor of `difference_max` for bfloat16 weights, of which only means are compared because they round so coarsely."""


@dataclass(frozen=True)
class ComparisonPlan:
    """Rows whose logprobs are compared.

    `regions` marks, for each named region, the loss tokens of all rows that lie there.
    """

    rows: tuple[Row, ...]
    regions: Mapping[str, NDArray[np.bool_]]
    unseen: tuple[str, ...]
    """Parts that the budget left out."""


def plan_comparison(config: Any, settings: TrainerSettings) -> ComparisonPlan:
    """Choose the token sequences on which the trainer's logprobs are compared with those of the model's own code.

    Args:
        config: the model's configuration, of its text part if it has several.
        settings: the trainer's settings, with the budget of tokens.
    """
    budget = settings.native.tokens
    if not budget:
        return ComparisonPlan((), {}, ("anything",))
    longest = min(settings.memory.sequence_tokens or settings.memory.queue_tokens, context_of(config))
    lengths: list[int] = []
    unseen: list[str] = []

    def add(length: int, part: str, times: int = 1) -> None:
        if sum(lengths) + times * length <= budget:
            lengths.extend([length] * times)
        else:
            unseen.append(part)

    for length in sorted({min(plain, longest) for plain in _PLAIN}):
        add(length, f"sequences of {length} tokens")
    points = sorted(turning_points(config).items())
    for point, name in points:
        if point < longest:
            add(min(point + _BEYOND, longest), f"tokens beyond {name} = {point}")
        elif settings.compute.packing == "blocks" and point < (settings.compute.pack_tokens or PACK_TOKENS):
            missing = max(0, point + _BEYOND - sum(lengths))
            add(longest, f"rows of several sequences beyond {name} = {point}", -(-missing // longest))
    compared = [(point, name) for point, name in points if any(length > point for length in lengths)]
    rows = tuple(_row(config, length, [point for point, _ in compared], seed) for seed, length in enumerate(lengths))
    return ComparisonPlan(rows, _masks_by_region(rows, compared), tuple(unseen))


def turning_points(config: Any) -> dict[int, str]:
    """Return the sequence lengths beyond which a model may compute attention differently, with their configuration
    fields. An example is the size of the sliding window.
    """
    return {value: name for name, value in integers(config.to_dict()) if _LENGTHS.search(name) and value > 1}


def integers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the names and values of all integers, including those of inner sections."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _row(config: Any, length: int, points: list[int], seed: int) -> Row:
    """Return a row of random ordinary tokens for the comparison of logprobs.

    Its loss tokens are at its beginning, at its end, and around each of `points`, where an error of the attention would
    show.
    """
    special = {value for name, value in integers(config.to_dict()) if "token_i" in name}
    ordinary = np.setdiff1d(np.arange(config.vocab_size), list(special))
    tokens = np.random.default_rng(seed).choice(ordinary, length).astype(np.int32)
    mask = np.zeros(length, np.bool_)
    mask[:_HEAD] = mask[-_BEYOND:] = True
    for point in points:
        mask[max(0, point - 2) : point + _BEYOND] = True
    mask[0] = False
    zeros = np.zeros(length, np.float32)
    return Row("", 0, tokens, mask, zeros, zeros + 1, np.float32(0), ~mask)


def _masks_by_region(rows: tuple[Row, ...], points: list[tuple[int, str]]) -> dict[str, NDArray[np.bool_]]:
    """Return a mask of the loss tokens of all rows for each named region.

    The first region is before all turning points, every other one begins at a turning point and ends at the next.

    Args:
        points: the turning points, each with the name of its setting, in ascending order.
    """
    if not rows:
        return {}
    at_N = np.concatenate([np.flatnonzero(row.loss_mask_T) for row in rows])
    passed_N = np.searchsorted([point for point, _ in points], at_N - 1, side="right")
    names = ["in short sequences", *(f"beyond {name} = {point}" for point, name in points)]
    return {name: passed_N == number for number, name in enumerate(names)}


@dataclass(frozen=True)
class NativeComparison:
    """Result of the comparison of the policy's logprobs with those of the model's own code.

    `difference` is the largest difference of all regions in nats, None when nothing was compared; `region` names its
    region. `unseen` lists the parts that the budget left out.
    """

    architecture: str
    difference: float | None
    region: str
    tokens: int
    unseen: tuple[str, ...]


class NativeLogprobs:
    """Logprobs of the model's own code, stored until the trainer's are computed, so that only one model is in
    memory."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        """Load the model of `folder` with transformers' eager attention, and compute its logprobs of fixed tokens.
        Blocks.

        Raises:
            SettingError: the model's code fails, or there is too little memory.
        """
        self._settings = settings
        config = config_of(folder)
        text = config.get_text_config()
        self._architecture = architecture_of(config)
        self._routed = any("expert" in name and count > 1 for name, count in integers(text.to_dict()))
        self._plan: ComparisonPlan = plan_comparison(text, settings)
        compute = resolve_types(settings.compute, device_of(settings.compute.device))
        rounds = bool(settings.lora.rank) or compute.weights == "bfloat16"
        self._dtype = weights_dtype(compute, frozen=rounds)
        self._coarse = self._dtype is not torch.float32
        self._native_N = self._native_logprobs(folder) if self._plan.rows else None

    def compare(self, policy: Policy) -> NativeComparison:
        """Compare the policy's logprobs with these. Raise `SettingError` if they differ by more than rounding."""
        if self._native_N is None:
            return NativeComparison(self._architecture, None, "", 0, self._plan.unseen)
        difference, region = self._largest(self._logprob_differences(policy, self._native_N))
        bound = self._settings.native.difference_max
        if not difference <= bound * (_COARSE if self._coarse else 1.0):
            raise self._refusal(
                f"differs from its own eager attention by {difference:.2g} nats {region}, "
                f"and rounding differs by {bound:g} at most"
            )
        tokens = sum(row.length for row in self._plan.rows)
        return NativeComparison(self._architecture, difference, region, tokens, self._plan.unseen)

    @torch.no_grad()
    def _native_logprobs(self, folder: Path) -> Tensor:
        device = device_of(self._settings.compute.device)
        model = from_folder(folder, self._dtype, "eager").to(device).eval()

        def compute() -> Tensor:
            return torch.cat(
                [_single_pass_logprobs(model, row.token_ids_T, row.loss_mask_T, device) for row in self._plan.rows]
            ).cpu()

        try:
            return self._in_memory(compute)
        except SettingError:
            raise
        except Exception as error:  # a model's code may raise any error
            remedy = f"{self._architecture} does not compute with its own eager attention: {first_line(error)}"
            raise SettingError("trainer.base", self._settings.base, remedy) from error

    @torch.no_grad()
    def _logprob_differences(self, policy: Policy, native_N: Tensor) -> Tensor:
        """Return the absolute differences between the logprobs of the policy and `native_N`, token by token.

        The policy computes the rows packed, as in a training step. The result has the order of the plan's rows.
        """
        rows, parts = self._plan.rows, torch.split(native_N, [int(row.loss_mask_T.sum()) for row in self._plan.rows])
        difference: dict[int, Tensor] = {}
        try:
            for indices in pack([row.length for row in rows], policy.pack_tokens):
                joined = policy.collate([rows[index] for index in indices])
                policy_N = self._in_memory(partial(_logprobs, policy, joined))
                by_row = torch.split(policy_N.cpu(), [len(parts[index]) for index in indices])
                difference |= {i: (row_N - parts[i]).abs() for i, row_N in zip(indices, by_row, strict=True)}
        except SettingError:
            raise
        except Exception as error:  # a model's code may raise any error with attention that is not its own
            raise self._refusal(f"does not compute: {first_line(error)}") from error
        return torch.cat([difference[index] for index in range(len(rows))])

    def _largest(self, difference_N: Tensor) -> tuple[float, str]:
        """Return the largest difference of all regions, and the name of its region."""
        by_region = {region: difference_N[torch.from_numpy(mask_N)] for region, mask_N in self._plan.regions.items()}
        sizes = [(self._summarize(region_N), region) for region, region_N in by_region.items() if len(region_N)]
        return max(sizes, key=lambda size: math.inf if math.isnan(size[0]) else size[0])

    def _summarize(self, difference_N: Tensor) -> float:
        if self._coarse:
            return float(difference_N.mean())
        return float(difference_N.quantile(_ROUTED_SHARE) if self._routed else difference_N.max())

    def _refusal(self, why: str) -> SettingError:
        if self._settings.compute.packing == "blocks":
            name, value, remedy = "trainer.compute.packing", "blocks", 'set "padded"'
        else:
            name, value, remedy = "trainer.base", self._settings.base, "train another base"
        return SettingError(name, value, f"{self._architecture} {why}; {remedy}")

    def _in_memory(self, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            remedy = f"{self._architecture} runs out of memory in so long a comparison: {first_line(error)}; lower it"
            raise SettingError("trainer.native.tokens", self._settings.native.tokens, remedy) from error


def compare_base(settings: TrainerSettings) -> NativeComparison:
    """Compare the logprobs of `trainer.base` on the CPU with those of its own code, for the check before a start.

    Blocks. Raises `SettingError`.
    """
    on_cpu = settings.model_copy(update={"compute": settings.compute.model_copy(update={"device": "cpu"})})
    folder = Path(settings.base)
    native = NativeLogprobs(folder, on_cpu)
    return native.compare(Policy.open(folder, on_cpu.compute, on_cpu.lora, on_cpu.seed))


def _logprobs(policy: Policy, pack: Pack) -> Tensor:
    """Return the policy's logprobs without autocast, so that the rounding of a coarser type hides no difference."""
    with policy.disable_compilation():
        return forward.logprobs(policy.model, policy.head, pack)[0]


def _single_pass_logprobs(model: Any, token_ids_T: Any, loss_mask_T: Any, device: torch.device) -> Tensor:
    """Return the logprobs of the loss tokens of one sequence, computed in one pass."""
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
