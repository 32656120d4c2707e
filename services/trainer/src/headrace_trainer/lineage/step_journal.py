"""Durable count of the steps that ended the trainer's process or lost its learner.

Such a step leaves no error behind, and the next process begins with the same batch. The count is what the next process
knows of it: after three lost steps with the same experience the batch is taken apart
(`headrace_trainer.lineage.culprits`), and the search goes on where the process before it was ended.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.isolation import TRIES, reason_of
from headrace_schemas.values.base import Model
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import LearnerLost

log = get_logger(__name__)
_LOSSES_MAX = 4096


class StepLost(HeadraceError):
    """Error: a step has ended its process, or lost the learner."""


class Loss(NamedTuple):
    """Count of the steps that ended their process or lost the learner, and the reason of the last one."""

    steps: int
    reason: str = "the training process ended during the step"


class LostSteps(Model):
    """Stored content of a `StepJournal`."""

    steps: int
    """Number of steps in the saved state that the process began with."""
    losses: dict[str, Loss]
    """Losses by experience (`_step_key`), and by part of a batch that was tried (`trial_key`)."""
    culprits: dict[str, str]
    """Reasons by experience (`_step_key`) that is at fault."""


class StepJournal:
    """Durable count of the steps of a lineage that ended their process or lost the learner.

    A process writes it before each step until it has saved a step: the next process begins with the same steps. Where
    the blob store is unavailable, a loss does not count.
    """

    def __init__(self, blobs: BlobStore, lineage: str, steps: int) -> None:
        """Open the journal of a lineage whose saved state has `steps` steps. An earlier journal of that state goes
        on."""
        self._blobs = blobs
        self._name = f"steps/{lineage}"
        self._steps = steps
        self._is_open = True
        content = self._read()
        if content is None or content.steps != steps:
            content = LostSteps(steps=steps, losses={}, culprits={})
        self._losses, self._culprits = content.losses, content.culprits

    def note_save(self, steps: int) -> None:
        """Stop counting as soon as the saved state has more steps: losses before it cannot repeat."""
        if steps != self._steps:
            self._is_open, self._losses, self._culprits = False, {}, {}

    def reasons(self, items: Sequence[WaitingExperience]) -> dict[str, str]:
        """Return by id the experiences of a batch that an earlier process found to be at fault, with the reasons."""
        names = {_step_key(item): item.experience.experience_id for item in items}
        return {name: self._culprits[key] for key, name in names.items() if key in self._culprits}

    def find_suspects(self, items: Sequence[WaitingExperience]) -> list[WaitingExperience]:
        """Return the experiences of a batch with which three steps were lost."""
        return [item for item in items if self.loss(_step_key(item)).steps >= TRIES]

    def suspect(self, suspects: Sequence[WaitingExperience]) -> Loss:
        """Begin a search among `suspects`: a step on all of them counts as lost already. Return their loss."""
        loss = self.loss(_step_key(suspects[0]))
        steps = 1 if len(suspects) > 1 else TRIES - 1
        self._losses.setdefault(trial_key(suspects), loss._replace(steps=steps))
        return loss

    def watch_step(self, items: Sequence[WaitingExperience]) -> contextlib.AbstractContextManager[None]:
        """Open a context for a training step on `items`."""
        return self.watch(*map(_step_key, items))

    @contextlib.contextmanager
    def watch(self, *keys: str) -> Iterator[None]:
        """Open a context for a step. It counts as lost for `keys` if the process ends or the learner is lost.

        A lack of memory that the learner has noticed does not count: no experience is at fault.
        """
        if not self._is_open:
            yield
            return
        before = self._losses
        self._losses = before | {key: Loss(self.loss(key).steps + 1) for key in keys}
        self._write()
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, LearnerLost) and not isinstance(error.__cause__, MemoryError)
            reason = reason_of(error)
            lost = {key: self._losses[key]._replace(reason=reason) for key in keys if is_lost}
            self._losses = before | lost
            self._write()
            raise
        self._losses = {key: loss for key, loss in self._losses.items() if key not in keys}

    def loss(self, key: str) -> Loss:
        """Return how often a step with this key was lost."""
        return self._losses.get(key, Loss(0))

    def end_search(self, suspects: Sequence[WaitingExperience], culprits: Mapping[str, str]) -> None:
        """Record the culprits among `suspects` by id, with their reasons, so that a later process need not search
        again."""
        if self._is_open:
            keys = {_step_key(item): item.experience.experience_id for item in suspects}
            self._losses = {k: loss for k, loss in self._losses.items() if k not in keys and _is_step_key(k)}
            self._culprits = self._culprits | {key: culprits[name] for key, name in keys.items() if name in culprits}
            self._write()

    def _read(self) -> LostSteps | None:
        try:
            data = self._blobs.pointer(self._name)
            return None if data is None else LostSteps.model_validate_json(data)
        except ValidationError as error:
            log.warning("step_journal_unreadable", name=self._name, error=str(error))
            return None

    def _write(self) -> None:
        losses = dict(list(self._losses.items())[-_LOSSES_MAX:])
        content = LostSteps(steps=self._steps, losses=losses, culprits=self._culprits)
        try:
            self._blobs.set_pointer(self._name, content.model_dump_json().encode())
        except Unavailable as error:
            log.warning("step_journal_not_written", name=self._name, error=str(error))


def _step_key(item: WaitingExperience) -> str:
    return f"step {item.experience.revision} {item.experience.experience_id}"


def _is_step_key(key: str) -> bool:
    return key.startswith("step ")


def trial_key(items: Sequence[WaitingExperience]) -> str:
    """Return the key by which the lost trial steps on `items` are counted."""
    names = sorted(item.experience.experience_id for item in items)
    return f"trial {hashlib.sha256(repr(names).encode(errors='replace')).hexdigest()}"
