"""The back end `torch`: a `Learner` whose weights and optimizer are in this process, on one device, and its copies."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.algorithms.catalog.hindsight import hindsight_of
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import (
    OPTIMIZER,
    VERSION,
    WEIGHTS,
    Abandoned,
    Abilities,
    Frozen,
    LearnerLost,
    NotFinite,
    StepRefused,
    StepResult,
    WholeCopy,
)
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import tensors, version_files
from headrace_trainer.torch_learner.hindsight import HindsightTeacher
from headrace_trainer.torch_learner.model.configuration import first_line
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.native import NativeComparison, NativeLogprobs
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from headrace_trainer.torch_learner.stored_tensors import StoredTensors
from headrace_trainer.torch_learner.token_advantages import Critic, TokenAdvantageEstimator, open_teacher

log = get_logger(__name__)
_MEMORY_REMEDY = "free memory on the device, or lower trainer.compute.pack_tokens"
_NATIVE_REMEDY = "raise trainer.native.tokens"


class TorchCopy:
    """Snapshot of weights and optimizer (`headrace_trainer.learner.Copy`), which copies them as late as possible.

    Until `detach`, `write` reads the learner's own tensors, one at a time. The learner calls `detach` before it changes
    them. Afterwards the snapshot has the content of its files in memory.
    """

    def __init__(
        self,
        write_weights: Callable[[Path], None],
        write_optimizer: Callable[[Path], None],
        freeze: Callable[[], Frozen],
        write_version: Callable[[Path], None] | None,
        fingerprint: Fingerprint | None,
    ) -> None:
        """Create a copy of the present state.

        Args:
            write_weights: function that writes the weights into a folder.
            write_optimizer: function that writes the optimizer into a folder.
            freeze: function that returns the content of both files.
            write_version: function that writes the version's files into a folder; None without a version.
            fingerprint: fingerprint of the version; None without a version.
        """
        self.fingerprint = fingerprint
        self._write_weights = write_weights
        self._write_optimizer = write_optimizer
        self._freeze = freeze
        self._write_version = write_version
        self._lock = threading.Lock()
        self._detached: WholeCopy | None = None
        self._dropped = False

    def write(self, folder: Path, on_weights: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._detached is not None:
                self._detached.write(folder, on_weights)
                return
            self._write_weights(folder)
            if self._write_version is not None:
                (folder / VERSION).mkdir()
                self._write_version(folder / VERSION)
            if on_weights is not None:
                on_weights()
            self._write_optimizer(folder)

    def detach(self) -> None:
        """Copy weights and optimizer into memory, so that the next step may change the learner's tensors.

        It has no effect on a snapshot that was detached or dropped before.
        """
        with self._lock:
            if self._detached is not None or self._dropped:
                return
            if self._write_version is None:
                self._detached = WholeCopy(self._freeze())
                return
            version = tempfile.TemporaryDirectory(prefix="headrace-version-")
            try:
                self._write_version(Path(version.name))
                self._detached = WholeCopy(self._freeze(), self.fingerprint, version)
            except BaseException:
                version.cleanup()
                raise

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            if self._detached is not None:
                self._detached.drop()
                self._detached = None


class TorchLearner:
    """Learner that trains with PyTorch on one device of this process."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        settings: TrainerSettings,
        served_as: torch.dtype,
        token_estimator: TokenAdvantageEstimator | None = None,
    ) -> None:
        """Create the learner.

        Args:
            policy: the model that is trained.
            optimizer: the optimizer of its weights.
            settings: the trainer's settings.
            served_as: type of the weights in the base's files and in those of versions.
            token_estimator: estimator of an advantage for each token; None if all tokens of a row have the row's.
        """
        self.policy = policy
        self.optimizer = optimizer
        self._settings = settings
        self.served_as = served_as
        self._token_estimator = token_estimator
        self._copy: TorchCopy | None = None
        """The last copy, from which the next change of the weights must be kept away."""

    @classmethod
    def open(cls, folder: Path, settings: TrainerSettings) -> TorchLearner:
        """Open a learner from the base's folder. Raises `SettingError`."""
        return open_learner(folder, settings, Policy)

    @property
    def abilities(self) -> Abilities:
        policy = self.policy
        return Abilities("lora" if policy.lora else "full", vocabulary=policy.vocabulary, context=policy.context)

    @property
    def failure(self) -> str | None:
        """Always None, because the learner is in the trainer's own process, so they only fail together."""
        return None

    def sequence_bound(self) -> int:
        return self.policy.sequence_bound()

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        self._detach_copy()
        settings, random = self._settings, tensors.random_state(self.policy)
        self.optimizer.changed = False
        try:
            return train(
                self.policy,
                self.optimizer,
                batch,
                settings.loss,
                self.policy.pack_tokens,
                stop,
                from_base=from_base,
                token_estimator=self._token_estimator,
            )
        except (NotFinite, StepRefused, Abandoned, LearnerLost):
            raise
        except Exception as error:
            if self.optimizer.changed:
                raise LearnerLost(f"a step failed while it changed the weights: {error}") from error
            self.optimizer.zero_grad()
            tensors.set_random_state(self.policy, random)
            if not tensors.is_out_of_memory(error):
                raise
            why = f"{first_line(error)}; {_MEMORY_REMEDY}"
        # Outside of the handler, because the traceback holds the tensors of the step.
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(why)

    def copy(self, base: str | None) -> TorchCopy:
        writes = None if base is None else partial(self._write_version, base=base)
        answers = None if base is None else self._version_fingerprint()
        self._copy = TorchCopy(self._write_weights, self._write_optimizer, self.freeze, writes, answers)
        if self._settings.save_beside:  # steps go on while it is written
            self._copy.detach()
        return self._copy

    def _detach_copy(self) -> None:
        if self._copy is not None:
            self._copy.detach()
            self._copy = None

    def freeze(self) -> Frozen:
        """Return the weights and the other state that the next step depends on, serialized."""
        return tensors.freeze(self.policy, self.optimizer, self._settings.lineage, self._estimator_state())

    def _write_weights(self, folder: Path) -> None:
        tensors.write_weights(folder, self.policy, self._settings.lineage)

    def _write_optimizer(self, folder: Path) -> None:
        tensors.write_optimizer(folder, self.policy, self.optimizer, self._settings.lineage, self._estimator_state())

    def _estimator_state(self) -> Mapping[str, Tensor] | None:
        return self._token_estimator.state() if self._token_estimator is not None else None

    def restore(self, folder: Path, *, with_random: bool) -> None:
        self._detach_copy()
        weights, state = StoredTensors(folder / WEIGHTS), StoredTensors(folder / OPTIMIZER)
        estimator_state = tensors.restore(self.policy, self.optimizer, weights, state, with_random=with_random)
        if self._token_estimator is not None:
            self._token_estimator.load(estimator_state)

    def load(self, folder: Path) -> None:
        self._detach_copy()
        self.policy.load_files(folder)
        self.optimizer.reset()
        if self._token_estimator is not None:
            self._token_estimator.load({})

    def _write_version(self, folder: Path, base: str) -> None:
        if self.policy.lora:
            version_files.save_adapter(self.policy, folder, base)
        else:
            version_files.write_weights(self.policy, folder, self.served_as)

    def _version_fingerprint(self) -> Fingerprint:
        if self.policy.lora:
            return self.policy.fingerprint()
        return version_files.fingerprint(self.policy, self.served_as)

    def fingerprint_of_base(self) -> Fingerprint:
        with self.policy.without_adapters():
            return self.policy.fingerprint()

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference."""


def open_learner(folder: Path, settings: TrainerSettings, kind: type[Policy]) -> TorchLearner:
    """Open a learner, and compare its logprobs with those of transformers' eager attention for the same model.

    The latter are computed first, so that there are never two copies of the model in memory. Raises `SettingError`.
    """
    native = NativeLogprobs(folder, settings)
    policy = kind.open(folder, settings.compute, settings.lora, settings.seed)
    _log_comparison(native.compare(policy))
    if settings.needs_base:
        policy.keep_reference(folder)
    chosen = settings.optimizer.with_rate_for_size(policy.size, adapters=policy.lora)
    log.info("learning_rate", rate=chosen.rate, parameters=policy.size, adapters=policy.lora)
    optimizer = Optimizer(policy.parameters, chosen, policy.hidden)
    return TorchLearner(policy, optimizer, settings, version_files.dtype_of(folder), _token_estimator(policy, settings))


def _token_estimator(policy: Policy, settings: TrainerSettings) -> TokenAdvantageEstimator | None:
    """Open the estimator of token advantages that the kind of advantage needs, if any. Raises `SettingError`."""
    if settings.needs.critic:
        if policy.head.unchunked_reason is not None:
            reason = policy.head.unchunked_reason
            remedy = f"a critic reads hidden states, and this model does not expose them: {reason}; use another one"
            raise SettingError("trainer.algorithm", settings.algorithm, remedy)
        width = policy.model.config.get_text_config().hidden_size
        return Critic(width, settings.critic, policy.device)
    if settings.needs.hindsight:
        return _hindsight(settings, policy.pack_tokens)
    return open_teacher(policy, settings) if settings.needs.teacher else None


def _hindsight(settings: TrainerSettings, pack_tokens: int) -> HindsightTeacher:
    chosen = hindsight_of(settings.advantage)
    if chosen.compared == "distributions" and (settings.loss.sequence_mask_max or not settings.loss.function.by_token):
        remedy = 'needs a loss that depends on single tokens: set loss.sequence_mask_max to 0, or "tokens"'
        raise SettingError("trainer.advantage.hindsight.compared", chosen.compared, remedy)
    return HindsightTeacher(chosen, pack_tokens)


def _log_comparison(result: NativeComparison) -> None:
    """Log the result of the comparison with the model's own attention, and the parts that were not compared."""
    if result.difference is not None:
        log.info(
            "native_compared", architecture=result.architecture, difference=result.difference, tokens=result.tokens
        )
    for part in result.unseen:
        log.warning("native_not_compared", architecture=result.architecture, what=part, remedy=_NATIVE_REMEDY)
