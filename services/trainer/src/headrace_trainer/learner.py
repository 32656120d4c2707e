"""The interface between a lineage and the learner that holds its weights and optimizer (`Learner`), and the base class
of learners that fit into this process.

A back end (`headrace_trainer.backends`) opens a learner from the folder that the lineage began with. No other code
touches tensors of the model. With every back end the trainer's process has the rest: offsets, the dedupe window,
waiting experiences, batches, advantages, the times of steps and saves, and the names of versions. So the promises about
the stream hold whichever back end computes the gradients.

`tests/contract/learner` tests these rules. Every back end passes it.

A learner whose state is larger than that writes and reads its copies in parts (`headrace_trainer.ray_learner`).
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from headrace_runtime.errors import HeadraceError
from headrace_runtime.process import liveness
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch

GRADIENT_FACTOR = "token_weight"
"""Name of the measurement: the factor of the gradient of each token, clipping included. Corrections need it."""
MEASURED = ("gradient_norm", "learning_rate", "step_seconds", GRADIENT_FACTOR, "tokens_per_second")
"""Measurements that every learner returns. A learner may add others to `StepResult.measured`."""
WEIGHTS, OPTIMIZER, VERSION = "weights.safetensors", "optimizer.safetensors", "version"
"""Names of the files and the folder that a snapshot (`Copy`) is written as."""
_PIECE_BYTES = 4 << 20


class Abandoned(Exception):
    """Raised by a step that stopped because the process is ending. The state in memory must not be saved."""


class NotFinite(Exception):
    """Raised by a step whose gradient was infinite or not a number. No weight was changed."""


class StepRefused(Exception):
    """Raised by a step that the algorithm forbids because of a measurement. No weight was changed.

    Training stops until it is resumed. If `undecided` is true, a larger batch that begins with these rows may be
    accepted, so the batch waits for more experiences instead.
    """

    def __init__(self, measure: str, value: float, why: str, *, undecided: bool = False) -> None:
        super().__init__(why)
        self.measure = measure
        self.value = value
        self.why = why
        self.undecided = undecided


class LearnerLost(HeadraceError):
    """Raised when a process or device that holds the weights has failed.

    The trainer's process ends, and the next start continues the lineage from its last save.
    """


@dataclass(frozen=True, slots=True)
class Abilities:
    """Properties of a learner that stay the same while it is open."""

    kind: Literal["full", "lora"]
    """Whether it trains all weights or adapters, and so which of them its versions hold."""
    vocabulary: int
    """Number of token ids that the model knows."""
    context: int
    """Longest sequence that the model was made for, in tokens."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a training step: measurements, and facts that later corrections need."""

    measured: Mapping[str, float]
    """Numbers by name, `MEASURED` among them. Infinite numbers and NaN are reported and not saved."""
    left_out: frozenset[str] = field(default=frozenset())
    """Rows, by `Row.name`, that `loss.sequence_mask_max` left out of the loss, so that the weights do not hold them."""
    slopes: Mapping[str, float] = field(default_factory=dict)
    """Slopes of rows whose loss is not linear in the advantage, by name: the factor that replaces 1 in the policy
    gradient of each of their tokens. Their corrections include it in their token weight
    (`headrace_trainer.algorithms.losses.Loss`)."""
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Advantages that the learner computed from a reward and its critic, by the name of the row, in units of the
    reward."""
    moved: bool = True
    """Whether the step changed a weight. Steps that changed none (all advantages were 0, say) make no version."""


class Copy(Protocol):
    """Snapshot of weights and optimizer, which later steps do not change.

    Its files contain the lineage's name, so that lineages share no blob.
    """

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the version's files, for engines to compare with; None where no version was requested.

        It is computed from the copied weights, rounded as in the files.
        """

    def write(self, folder: Path, on_weights: Callable[[], None] | None = None) -> None:
        """Write the snapshot into the empty `folder`, so that another process of this back end can continue training
        from it.

        - `WEIGHTS`: the trained weights. Equal weights give equal bytes, and different weights different bytes.
        - `OPTIMIZER`: the rest of the state that the next step depends on: the optimizer's state, clocks, random
          numbers.
        - the folder `VERSION`, where a version was requested: only the weights, either all of them as `*.safetensors`
          in the type of the base, or an adapter in PEFT's layout that names the base. Equal weights give equal files.

        The trainer calls it in another thread while `step` runs, and again (with another folder) after the disk or the
        blob store was unavailable.

        Args:
            folder: The folder.
            on_weights: Called once, when `WEIGHTS` and `VERSION` are complete and before `OPTIMIZER` is written where
                the learner can do so. It may move or remove the files, so that the disk never holds all three.

        Raises:
            LearnerLost: The learner has failed.
            OSError: The folder cannot be written.
        """

    def drop(self) -> None:
        """Release the memory of the snapshot. Calling it again has no effect."""


class Learner(Protocol):
    """Interface of a learner, which holds weights and optimizer of one lineage.

    Its owner makes one call at a time, and may read `failure` meanwhile. Every method may block. The same base,
    settings and calls give the same weights, byte for byte on the same machine.
    """

    @property
    def abilities(self) -> Abilities:
        """Properties of the learner, known from the start."""

    @property
    def failure(self) -> str | None:
        """Reason why the learner cannot continue, or None while it can; `/health` reports it.

        The trainer reads it at any time from any thread, so it must not block. Calls that need the failed part raise
        `LearnerLost`.
        """

    def sequence_bound(self) -> int:
        """Return the longest sequence, in tokens, that a step has memory for.

        Called before the first step, and only where `memory.sequence_tokens` is not set.

        Raises:
            SettingError: Not even a short sequence fits.
        """

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        """Take a training step: change the weights by each row of `batch` once, corrections included, with the
        settings' loss.

        Rows with the same `Row.together` go through one forward pass.

        Args:
            stop: set when the process is ending.
            from_base: measure the divergence from the base (`kl_base`) even where the loss does not use it. Set only
                for a back end that offers `Needs.reference`.

        Raises:
            NotFinite: the gradient is infinite or not a number. Nothing was changed.
            StepRefused: a measurement forbids the step. Nothing was changed.
            Abandoned: raised soon after `stop` is set. The state in memory is lost and must not be saved.
            LearnerLost: the learner has failed. The state in memory is lost and must not be saved.
            MemoryError: the step needs more memory than is free. Nothing was changed. After three tries the process
                ends, and the next start measures `sequence_bound` again.
            Exception: any other error. Nothing was changed, random numbers included: the lineage then searches for the
                rows that make the step fail, and continues without them.
        """

    def copy(self, base: str | None) -> Copy:
        """Take a snapshot of the present weights and the optimizer. The call changes nothing.

        There is at most one snapshot: the trainer drops it before the next one.

        Args:
            base: The lineage's first version, if the snapshot must also become a version.
        """

    def restore(self, folder: Path, *, with_random: bool) -> None:
        """Restore the state of a learner from a snapshot that `Copy.write` stored in `folder`.

        The snapshot may come from this learner or from one in an earlier process.

        Args:
            folder: The folder with the snapshot. It is removed afterwards.
            with_random: Restore random numbers too, so that the next step is the same as it would have been after the
                snapshot; otherwise restore only weights and optimizer.

        Raises:
            SettingError: The snapshot is of another model, or of settings that cannot continue from it.
        """

    def load(self, folder: Path) -> None:
        """Load the weights from a version's files in `folder` and reset the optimizer. The folder is removed."""

    def fingerprint_of_base(self) -> Fingerprint:
        """Return the fingerprint of the lineage's first version. Called before the first step."""

    def close(self) -> None:
        """Release memory, processes and connections. No method is called afterwards; closing again has no effect."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Serialized state of a learner: returned by `WholeLearner.freeze` and restored by `WholeLearner.thaw`."""

    weights: bytes | bytearray
    """Content of the file `WEIGHTS` of a `Copy`."""
    optimizer: bytes | bytearray
    """Content of the file `OPTIMIZER` of a `Copy`."""


class WholeLearner(ABC):
    """Base class of learners whose whole state fits into the memory of this process.

    It implements `copy` and `restore` with the methods `freeze`, `thaw` and `write` of a subclass.
    """

    @abstractmethod
    def freeze(self) -> Frozen:
        """Return all state that the next step depends on, serialized. The call changes nothing."""

    @abstractmethod
    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        """Restore the state that `freeze` returned; see `Learner.restore`."""

    @abstractmethod
    def write(self, folder: Path, base: str) -> Fingerprint:
        """Write the present weights into the empty `folder`, in the layout of a version (`Copy`).

        Returns:
            The fingerprint of these weights.
        """

    def copy(self, base: str | None) -> WholeCopy:
        frozen = self.freeze()
        if base is None:
            return WholeCopy(frozen)
        folder = tempfile.TemporaryDirectory(prefix="headrace-version-")
        try:
            return WholeCopy(frozen, self.write(Path(folder.name), base), folder)
        except BaseException:
            folder.cleanup()
            raise

    def restore(self, folder: Path, *, with_random: bool) -> None:
        frozen = Frozen((folder / WEIGHTS).read_bytes(), (folder / OPTIMIZER).read_bytes())
        self.thaw(frozen, with_random=with_random)


@dataclass(frozen=True)
class WholeCopy:
    """Snapshot (`Copy`) of a `WholeLearner` in memory. It can be written to files while the learner takes steps."""

    frozen: Frozen
    fingerprint: Fingerprint | None = None
    version: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def write(self, folder: Path, on_weights: Callable[[], None] | None = None) -> None:
        _write(folder / WEIGHTS, self.frozen.weights)
        if self.version is not None:
            shutil.copytree(self.version.name, folder / VERSION)
            liveness.progress()
        if on_weights is not None:
            on_weights()
        _write(folder / OPTIMIZER, self.frozen.optimizer)

    def drop(self) -> None:
        if self.version is not None:
            self.version.cleanup()


def _write(path: Path, content: bytes | bytearray) -> None:
    with path.open("wb") as file, memoryview(content) as view:
        for at in range(0, len(view), _PIECE_BYTES):
            file.write(view[at : at + _PIECE_BYTES])
            liveness.progress()
