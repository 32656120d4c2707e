"""Losses by name: the entry points `headrace.losses` of installed packages.

Importing an entry point must be cheap; `load` imports the function, and torch with it. The default loss is in
`loss.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.presets import NOTHING, Needs

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss: one entry for each trained token of a forward pass (`_N`), row by row.

    The first three fields are logprobs, and only `current_N` has a gradient.
    """

    current_N: Tensor
    """Logprobs of the present weights."""
    start_N: Tensor
    """Logprobs of the weights at the start of the step."""
    behaviour_N: Tensor
    """Logprobs of the engine that sampled the tokens."""
    advantage_N: Tensor
    row_N: Tensor
    """The experience that each token belongs to, counted from 0."""
    left_out_N: Tensor | None = None
    """Tokens of experiences that are left out of the loss, or None where there are none."""
    reference_N: Tensor | None = None
    """Logprobs of the lineage's base, where `Needs.reference` is set."""
    written_N: Tensor | None = None
    """Tokens that were written, or whose engine reported no logprobs: their `behaviour_N` has no meaning. A loss with
    `Needs.logprobs` gets none that were not written. None where there are none."""
    pair_R: Tensor | None = None
    """Index of the row that each row is compared with, its own index where there is none, or None without
    comparisons."""


Compute = Callable[[LossInputs, "LossSettings"], "TokenLoss"]
"""Returns the loss of each token. It must be linear in the advantage, so that a correction can add the missing part; a
loss that is not linear names another one for corrections (`Loss.correction`)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss function with its requirements. `settings` is the class of its section `[trainer.loss.<name>]`, or None."""

    load: Callable[[], Compute]
    needs: Needs = NOTHING
    settings: type[Section] | None = None
    by_token: bool = False
    """Whether the loss of a token depends on no other token. Then it is computed in parts, while the output head holds
    their logits, and the head's product is not computed again for the gradient."""
    correction: Callable[[], Compute] | None = None
    """The loss of corrections where `load` is not linear in the advantage. It must have the same slope for all tokens
    of a row: the learner reports that slope (`StepResult.slopes`), and a correction includes it."""
    origins: bool = False
    """Whether it distinguishes written tokens from sampled ones, and needs no logprobs of the former."""


LOSSES: Registry[Loss] = Registry("losses", Loss, "loss")


def _clipped() -> Compute:
    from headrace_trainer.algorithms.loss import clipped_loss

    return clipped_loss


def _likelihood() -> Compute:
    from headrace_trainer.algorithms.loss import likelihood

    return likelihood


LIKELIHOOD = Loss(_likelihood, by_token=True)
"""-A log pi: the loss of demonstrations, and of corrections of losses that are no policy gradient."""
CLIPPED = Loss(_clipped, Needs(logprobs=True), by_token=True)
"""The clipped, importance-weighted policy gradient."""
