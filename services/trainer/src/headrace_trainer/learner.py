"""What a lineage needs of whoever holds weights and optimizer. Nobody else touches a tensor of the model.

A back end (`headrace_trainer.backends`) opens a learner from the folder that the lineage began with. All else stays in
the trainer's process for every back end: offsets, the dedupe window, what waits, batches, advantages, when to step,
what is saved where, and how a version is named. So the promises about the stream hold whatever computes the gradients.

`tests/contract/learner` says the same as tests. Every back end passes them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from headrace_runtime.errors import HeadraceError
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.batches.batch import Batch

GRADIENT_FACTOR = "token_weight"
"""The measurement: what the gradient of each token was multiplied with, clipping and all. A correction needs it."""
MEASURED = ("gradient_norm", "learning_rate", "step_seconds", GRADIENT_FACTOR, "tokens_per_second")
"""What every learner measures. The rest of `StepResult.measured` is its own."""
WEIGHTS, OPTIMIZER, VERSION = "weights.safetensors", "optimizer.safetensors", "version"
"""Two files, and a folder of a version's files: what a copy is written as."""


class Abandoned(Exception):
    """The step was told to stop. The process is ending; what is in memory is not to be saved."""


class NotFinite(Exception):
    """The gradient was infinite or not a number; nothing was changed."""


class StepRefused(Exception):
    """What was measured before the step forbids it; no weight was changed. Training stops until somebody says that it
    goes on. `undecided`: a larger batch that begins with these rows may be allowed; as long as more comes, it waits."""

    def __init__(self, measure: str, value: float, why: str, *, undecided: bool = False) -> None:
        super().__init__(why)
        self.measure = measure
        self.value = value
        self.why = why
        self.undecided = undecided


class LearnerLost(HeadraceError):
    """What holds the weights has died, or a part of it. The process ends, and the next start opens the lineage as it
    was saved last."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a learner can be given. Nothing of it changes while the learner is open."""

    kind: Literal["full", "lora"]
    """Whether it trains all weights or adapters: what its versions hold."""
    vocabulary: int
    """Token ids that the model knows."""
    context: int
    """Longest sequence that the model was made for, in tokens."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step."""

    measured: Mapping[str, float]
    """Numbers by name, `MEASURED` among them. Not finite ones are reported and not saved."""
    left_out: frozenset[str] = field(default=frozenset())
    """Rows, by `Row.name`, that `loss.sequence_mask_max` left out of the loss: the weights hold nothing of them."""
    slopes: Mapping[str, float] = field(default_factory=dict)
    """Of rows whose loss is not linear in the advantage, by name: what stood in the place of 1 in the policy gradient
    of each of its tokens. Their corrections come with it in their token weight
    (`headrace_trainer.algorithms.losses.Loss`)."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Of rows whose advantage the learner made from a reward and its critic, by name: what it was, in units of the
    reward."""
    moved: bool = True
    """Whether the step changed a weight. No version is made of steps that changed none (all advantages were 0, say)."""


class Copy(Protocol):
    """Weights and optimizer at one moment, whatever steps come after it. The lineage's name is in both, so that
    lineages share no blob."""

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the version's files answer, for engines to compare with (P7): computed from the weights of that moment,
        rounded as the files are. None where no version was asked for."""

    def write(self, folder: Path) -> None:
        """Into the empty `folder`, as any process of this back end can go on from:

        - `WEIGHTS`: what is trained. Equal weights give equal bytes, and other weights other bytes.
        - `OPTIMIZER`: all else that the next step depends on: the optimizer's state, clocks, random numbers.
        - the folder `VERSION`, where one was asked for: the weights, and nothing else: all of them as `*.safetensors`
          in the type that the base has; or an adapter in PEFT's layout that names the base. Equal weights give equal
          files.

        Called beside `step`, from another thread, and again (with another folder) where the disk or the blob store was
        away. Raises `LearnerLost`, and `OSError` of the folder."""

    def drop(self) -> None:
        """It is not needed any more: give back what holds it. Again does nothing."""


class Learner(Protocol):
    """Weights and optimizer of one lineage. Its owner makes one call at a time, and may ask for `failure` beside it.
    Every method may block.

    The same base, settings and calls give the same weights, byte for byte on the same machine (P9).
    """

    @property
    def abilities(self) -> Abilities:
        """Known from the start."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, None while it can; `/health` says it. Asked at any time from any thread, so it does not
        block. Calls that need what has failed raise `LearnerLost`."""

    def sequence_bound(self) -> int:
        """Tokens of the longest sequence that a step has memory for. Asked before the first step, and only where
        `memory.sequence_tokens` does not say it. Raises `SettingError` when not even a short one fits."""

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        """Change the weights by `batch`: each of its rows once, first ones and corrections, with the loss that the
        settings name. Rows with the same `Row.together` go through one forward pass. `from_base`: measure the
        divergence from the base (`kl_base`) also where it has no part in the loss; only asked of a back end that offers
        `Needs.reference`.

        Raises `NotFinite` and `StepRefused`, with nothing changed. Raises `Abandoned` soon after `stop` is set, and
        `LearnerLost`; what is in memory is then worth nothing, and is not saved. Whatever else it raises, nothing was
        changed, random numbers included: the lineage then finds the rows because of which it fails, and goes on without
        them.
        """

    def copy(self, base: str | None) -> Copy:
        """Weights and optimizer as they are. `base`, the lineage's first version: a version is made of them, too. There
        is one copy at a time: the one before it is dropped first. Changes nothing."""

    def restore(self, folder: Path, *, with_random: bool) -> None:
        """Go back to what a copy has written into `folder`, of this learner or of one in an earlier process.
        `with_random`: the random numbers too, so that the next step is the one that would have followed; else weights
        and optimizer alone. The folder is gone afterwards.

        Raises `SettingError` when it is of another model, or of settings that cannot go on from it.
        """

    def load(self, folder: Path) -> None:
        """Take the weights from a version's files and forget all momentum. The folder is gone afterwards."""

    def fingerprint_of_base(self) -> Fingerprint:
        """What the first version answers. Asked before the first step."""

    def close(self) -> None:
        """Give back memory, processes and connections. No method is called afterwards; closing again does nothing."""
