"""What training would do with a stream of experiences. No model is loaded; admission, cutting and batches are real.

Batches do not depend on weights, so training gets the same digests (P9). What only weights can decide is taken from the
record of the original lineage as long as the batches are the same: whether a gradient was not finite, which experiences
a step could not train, and after which batches a version was made. Of other batches the dry run assumes that every
gradient is finite, no step fails, no limit of `[trainer.health]` is passed, and that a step changes the weights where
an advantage is not zero. In no case does it know of sequences that are masked whole and corrected later.

As a filter (`python -m headrace_trainer.replay`) it reads lines `recorded`, the batches of the original training, and
lines `experience`. Lines `batch` stand before the experience after which the original training cut batches, and have
the number of experiences that each was cut from. The filter writes one line `dry_run`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import SettingError
from headrace_runtime.filters import Lines
from headrace_runtime.settings import Common
from headrace_schemas import Branch, Experience
from headrace_schemas.blobs import BlobRef
from headrace_schemas.replay import DryRunBatch, DryRunLine, RecordedBatch
from headrace_schemas.user_text import read_user_text
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.cutting import BEGINNING_OF_TIME, END_OF_TIME, Cutter, decay
from headrace_trainer.batches.prepare import Prepared, prepare, prepare_isolated
from headrace_trainer.experiences.admission import limits_of
from headrace_trainer.experiences.history import History, Published
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.lineage.store import replayed
from headrace_trainer.settings import TrainerSettings

_START = datetime(1970, 1, 1, tzinfo=UTC)
"""The only time in a dry run."""


async def run(common: Common, settings: TrainerSettings) -> None:
    """The filter."""
    lines = Lines()
    dry_run = DryRun(settings, BlobStore.open(common))
    marks: list[int] = []
    async for word, value in lines.read():
        if word == "recorded":
            dry_run.expect(RecordedBatch.model_validate_json(value))
        elif word == "batch":
            marks.append(int(value))
        else:
            dry_run.add(Experience.from_json(value), marks)
            marks = []
    lines.write("dry_run", dry_run.end().model_dump_json().encode())
    lines.flush()


class DryRun:
    """A lineage without weights. `add` experiences in order, then `end`."""

    def __init__(self, settings: TrainerSettings, blobs: BlobStore) -> None:
        """Raises `SettingError` as a start of the trainer would."""
        self._settings = settings
        self._cutter = Cutter(settings)
        self._decay = decay(settings)
        vocabulary, context = _shape(Path(settings.base))
        history = History.begin(_version(settings.model, 0, None, 0, 0))
        self._state = LineageState(
            History(history.versions, history.head, 0, replayed(settings, blobs)),
            limits_of(settings, vocabulary, context),
            settings.memory,
        )
        self._place = 0
        self._branches: dict[str, Branch] = {}
        """The tokens of what the window holds."""
        self._fates: Counter[str | None] = Counter()
        self._ignored: Counter[str] = Counter()
        self._batches: list[DryRunBatch] = []
        self._recorded: list[RecordedBatch] = []
        self._moved = False
        """Whether the weights differ from those of the last version."""

    def expect(self, batch: RecordedBatch) -> None:
        """Note the next batch of the original lineage and what came of it."""
        self._recorded.append(batch)

    def add(self, experience: Experience, marks: Sequence[int] = ()) -> None:
        """`marks`: the original training cut batches of so many experiences after this one."""
        if experience.model != self._settings.model:
            self._ignored["other_models"] += 1
        elif self._state.admit(self._whole(experience), (0, self._place), _START).fate == "ignore":
            self._ignored["duplicates"] += 1
        self._place += 1
        for mark in marks or (None,):
            self._act(BEGINNING_OF_TIME, mark)

    def _whole(self, experience: Experience) -> Experience:
        """A withdrawal need not repeat the tokens; to undo what they did training reads them again from the bus."""
        name = experience.experience_id
        if experience.branch is not None:
            self._branches[name] = experience.branch
            return experience
        entry = self._state.window.get(name)
        trained = entry is not None and entry.trained
        return experience.model_copy(update={"branch": self._branches.get(name)}) if trained else experience

    def end(self) -> DryRunLine:
        """Nothing more will come."""
        while self._act(END_OF_TIME):
            pass
        self._count()
        trained = self._fates.pop(None, 0)
        return DryRunLine.model_validate(
            {
                "trained": trained,
                "dropped": dict(sorted((str(reason), count) for reason, count in self._fates.items())),
                "duplicates": self._ignored["duplicates"],
                "other_models": self._ignored["other_models"],
                "waiting": len(self._state.waiting),
                "batches": tuple(self._batches),
                "versions": len(self._state.history.versions) - 1,
            }
        )

    def _act(self, now: datetime, mark: int | None = None) -> bool:
        if self._finished:
            return False
        items = self._cutter.next(self._state, now, mark)
        if items:
            self._step(items)
        self._count()
        return bool(items)

    @property
    def _finished(self) -> bool:
        return self._settings.max_steps is not None and self._state.steps >= self._settings.max_steps

    def _step(self, items: tuple[Waiting, ...]) -> None:
        state, settings, number = self._state, self._settings, len(self._batches)
        recorded = self._recorded[number] if number < len(self._recorded) else None
        left, prepared = self._prepare(items, frozenset(recorded.left_out if recorded else ()))
        if prepared is None:
            return
        digest = prepared.batch.digest()
        self._batches.append(DryRunBatch(experiences=len(left), digest=digest))
        same = recorded if recorded is not None and recorded.digest == digest else None
        if same is not None and not same.trained:
            for item in left:
                state.drop(item, "invalid")
            return
        state.stepped(prepared.trained, prepared.baselines)
        self._moved = self._moved or moves(prepared.batch, settings)
        due = self._moved and state.steps - state.history.head_step >= settings.steps_per_version
        if due if same is None else same.published:
            self._publish()

    def _prepare(
        self, items: tuple[Waiting, ...], left_out: frozenset[str]
    ) -> tuple[tuple[Waiting, ...], Prepared | None]:
        state, settings = self._state, self._settings
        for item in items:
            if item.experience.experience_id in left_out:
                state.leave_out(item, "the step of the original lineage failed with it")
        rest = [item for item in items if item.experience.experience_id not in left_out]
        if not rest:
            return (), None
        isolated = prepare_isolated(
            rest, lambda some: prepare(some, state, settings.advantage, self._decay, loss=settings.loss)
        )
        for item, reason in isolated.culprits:
            state.leave_out(item, reason)
        return isolated.items, isolated.prepared

    def _publish(self) -> None:
        state, settings, history = self._state, self._settings, self._state.history
        version = _version(settings.model, history.next_number, history.head, history.head_step + 1, state.steps)
        keep = {history.versions[0].version}
        state.history, self._moved = history.published(version, keep, settings.memory.versions), False
        state.forget(_START)
        if len(self._branches) > 2 * len(state.window):
            self._branches = {name: self._branches[name] for name in state.window if name in self._branches}

    def _count(self) -> None:
        self._fates.update(outcome.dropped for outcome in self._state.outcomes)
        self._state.hand_over()


def moves(batch: Batch, settings: TrainerSettings) -> bool:
    """Return whether a step on `batch` would change the weights. Where advantages are all that pulls at them, and are
    zero, it would not: no back end spends momentum then."""
    loss, needs = settings.loss, settings.needs
    pulled = loss.kl > 0 or loss.function.correction is not None or needs.critic or needs.teacher or needs.hindsight
    return pulled or any(row.has_advantage for row in batch.rows)


def _version(model: str, number: int, parent: str | None, first: int, last: int) -> Published:
    """A version in name only."""
    digest = hashlib.sha256(f"dry run {number}".encode()).hexdigest()
    nothing = BlobRef(uri="none", sha256=digest, size=0)
    name = f"{model}@{digest[:16]}"
    return Published(version=name, parent=parent, number=number, manifest=nothing, first_step=first, last_step=last)


def _shape(base: Path) -> tuple[int, int]:
    """Vocabulary and context of the model in `base`, from its configuration alone."""
    path = base / "config.json"
    try:
        config = json.loads(read_user_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError("trainer.base", str(base), f"has no readable config.json: {error}") from None
    text = config.get("text_config") or config
    vocabulary = text.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise SettingError("trainer.base", str(base), "its config.json has no vocab_size")
    return vocabulary, int(text.get("max_position_embeddings") or 1 << 30)
