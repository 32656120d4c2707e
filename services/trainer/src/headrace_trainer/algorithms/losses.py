"""Losses by name: whatever an installed package announces under the entry points `headrace.losses`.

An announcement is light; `load` imports the function, and torch with it. Ours is in `loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings import Section
from headrace_trainer.algorithms.needs import NOTHING, Needs

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a pass (`_N`), row by row. The first three are logprobs; a gradient flows through
    `current_N` alone."""

    current_N: Tensor
    """Of the weights now."""
    start_N: Tensor
    """Of the weights at the start of the step."""
    behaviour_N: Tensor
    """Of the engine that sampled them."""
    advantage_N: Tensor
    row_N: Tensor
    """The experience that each token belongs to, counted from 0."""
    left_out_N: Tensor | None = None
    """Tokens of experiences that have no part in the loss; None where all have."""
    reference_N: Tensor | None = None
    """Logprobs of the model that the lineage began with, where `Needs.reference` asks for them."""
    written_N: Tensor | None = None
    """Tokens that nobody sampled: their `behaviour_N` says nothing. None where there are none."""
    pair_R: Tensor | None = None
    """Of each row the one that it is compared with, itself where there is none; None where nothing is compared."""


Compute = Callable[[Sampled, "LossSettings"], "TokenLoss"]
"""The loss of each token. It is linear in the advantage, so that a correction can add what is missing; one that is not
is corrected by another (`Loss.correction`)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss. `settings` are its own: the section `[trainer.loss.<name>]`, `LossSettings.of(name)`."""

    load: Callable[[], Compute]
    needs: Needs = NOTHING
    settings: type[Section] | None = None
    by_token: bool = False
    """The loss of a token depends on no other token. Then it is computed in parts, while the head holds their logits,
    and the head's product is not computed again for the gradient."""
    correction: Callable[[], Compute] | None = None
    """How corrections are trained where `load` is not linear in the advantage. It is the same for all tokens of a row:
    the learner reports the slope of each row (`StepResult.slopes`), and a correction comes with that."""
    origins: bool = False
    """It tells written tokens from sampled ones, and asks the former for no logprobs."""


LOSSES: Registry[Loss] = Registry("losses", Loss, "loss")


def _clipped() -> Compute:
    from headrace_trainer.algorithms.loss import clipped

    return clipped


def _likelihood() -> Compute:
    from headrace_trainer.algorithms.loss import likelihood

    return likelihood


LIKELIHOOD = Loss(_likelihood, by_token=True)
"""- A log pi: of demonstrations, and of corrections of what is no policy gradient."""
CLIPPED = Loss(_clipped, Needs(logprobs=True), by_token=True)
"""The clipped, importance-weighted policy gradient."""
