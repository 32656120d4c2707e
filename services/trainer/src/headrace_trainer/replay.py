"""`python -m headrace_trainer.replay`: computes which batches training would make from a stream of experiences. No
model is loaded; admission, cutting and batches are the real ones.

Batches do not depend on weights, so training gets the same digests. Facts that only weights decide are taken from
the record of the original lineage as long as the batches are the same: whether a gradient was finite, which experiences
a step could not train, and after which batches a version was made. For other batches the dry run assumes that every
gradient is finite, no step fails, no limit of `[trainer.health]` is passed, and that a step changes the weights where
an advantage is not zero. In no case does it know of sequences that are masked as a whole and corrected later.

As a filter it reads lines `recorded`, the batches of the original training, and
lines `experience`. Lines `batch` come before the experience after which the original training cut batches, and contain
the number of experiences that each was cut from. The filter writes one line `dry_run`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_runtime.errors import SettingError
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Branch, Experience
from headrace_schemas.programs import DryRunBatch, DryRunLine, RecordedBatch
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.text import read_user_text
from headrace_trainer.batches.batch import Batch
from headrace_trainer.batches.cutting import BEGINNING_OF_TIME, END_OF_TIME, Cutter, decay
from headrace_trainer.batches.prepare import PreparedBatch, prepare, prepare_isolated
from headrace_trainer.experiences.admission import limits_of
from headrace_trainer.experiences.history import VERSIONS_MAX, History, PublishedVersion
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.lineage.store import replayed_versions
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer",
    "A dry run of training: experiences in, batches out.",
    TrainerSettings,
    "headrace_trainer.replay:run",
)
_START = datetime(1970, 1, 1, tzinfo=UTC)
"""The only time in a dry run."""


async def run(common: Common, settings: TrainerSettings) -> None:
    """Run a dry run of training: read experiences from standard input, write the resulting batches to standard
    output."""
    lines = Lines()
    dry_run = DryRun(settings, BlobStore.open(common))
    recorded_sizes: list[int] = []
    async for word, value in lines.read():
        if word == "recorded":
            dry_run.expect(RecordedBatch.model_validate_json(value))
        elif word == "batch":
            recorded_sizes.append(int(value))
        else:
            dry_run.add(Experience.from_json(value), recorded_sizes)
            recorded_sizes = []
    lines.write("dry_run", dry_run.end().model_dump_json().encode())
    lines.flush()


class DryRun:
    """Training without weights, which computes only the batches. Call `add` for each experience in order, then
    `end`."""

    def __init__(self, settings: TrainerSettings, blobs: BlobStore) -> None:
        """Open the dry run. Raises `SettingError` as a start of the trainer would."""
        self._settings = settings
        self._cutter = Cutter(settings)
        self._decay = decay(settings)
        vocabulary, context = _shape(Path(settings.base))
        history = History.begin(_version(settings.model, 0, None, 0, 0))
        self._state = LineageState(
            History(history.versions, history.head, 0, replayed_versions(settings, blobs)),
            limits_of(settings, vocabulary, context),
            settings.memory,
        )
        self._offset = 0
        self._branches: dict[str, Branch] = {}
        """The branches of the experiences in the window."""
        self._outcomes: Counter[str | None] = Counter()
        self._ignored: Counter[str] = Counter()
        self._batches: list[DryRunBatch] = []
        self._recorded: list[RecordedBatch] = []
        self._weights_changed = False
        """Whether the weights differ from those of the last version."""

    def expect(self, batch: RecordedBatch) -> None:
        """Add the next batch that the original training recorded, with its outcome.

        If the dry run forms the same batch, it takes over the outcomes that depend on weights.
        """
        self._recorded.append(batch)

    def add(self, experience: Experience, recorded_sizes: Sequence[int] = ()) -> None:
        """Admit an experience, and form the batches that follow it.

        Args:
            experience: the next experience.
            recorded_sizes: sizes of the batches that the original training formed right after this experience.
        """
        if experience.model != self._settings.model:
            self._ignored["other_models"] += 1
        elif self._state.admit(self._with_branch(experience), (0, self._offset), _START).action == "ignore":
            self._ignored["duplicates"] += 1
        self._offset += 1
        for recorded_size in recorded_sizes or (None,):
            self._act(BEGINNING_OF_TIME, recorded_size)

    def _with_branch(self, experience: Experience) -> Experience:
        """Return the experience with its branch, which is missing in the event of a withdrawn reward and is taken from
        the earlier event.
        """
        name = experience.experience_id
        if experience.branch is not None:
            self._branches[name] = experience.branch
            return experience
        entry = self._state.window.get(name)
        trained = entry is not None and entry.trained
        return experience.model_copy(update={"branch": self._branches.get(name)}) if trained else experience

    def end(self) -> DryRunLine:
        """Train the remaining experiences and return the result."""
        while self._act(END_OF_TIME):
            pass
        self._count()
        trained = self._outcomes.pop(None, 0)
        return DryRunLine.model_validate(
            {
                "trained": trained,
                "dropped": dict(sorted((str(reason), count) for reason, count in self._outcomes.items())),
                "duplicates": self._ignored["duplicates"],
                "other_models": self._ignored["other_models"],
                "waiting": len(self._state.waiting),
                "batches": tuple(self._batches),
                "versions": len(self._state.history.versions) - 1,
            }
        )

    def _act(self, now: datetime, recorded_size: int | None = None) -> bool:
        if self._finished:
            return False
        items = self._cutter.next_batch(self._state, now, recorded_size)
        if items:
            self._step(items)
        self._count()
        return bool(items)

    @property
    def _finished(self) -> bool:
        return self._settings.max_steps is not None and self._state.steps >= self._settings.max_steps

    def _step(self, items: tuple[WaitingExperience, ...]) -> None:
        state, settings, number = self._state, self._settings, len(self._batches)
        recorded = self._recorded[number] if number < len(self._recorded) else None
        remaining, prepared = self._prepare(items, frozenset(recorded.left_out if recorded else ()))
        if prepared is None:
            return
        digest = prepared.batch.digest()
        self._batches.append(DryRunBatch(experiences=len(remaining), digest=digest))
        original = recorded if recorded is not None and recorded.digest == digest else None
        if original is not None and not original.trained:
            for item in remaining:
                state.drop(item, "invalid")
            return
        state.record_step(prepared.trained, prepared.baselines)
        self._weights_changed = self._weights_changed or changes_weights(prepared.batch, settings)
        enough_steps = self._weights_changed and state.steps - state.history.head_step >= settings.steps_per_version
        if enough_steps if original is None else original.published:
            self._publish()

    def _prepare(
        self, items: tuple[WaitingExperience, ...], left_out: frozenset[str]
    ) -> tuple[tuple[WaitingExperience, ...], PreparedBatch | None]:
        state, settings = self._state, self._settings
        for item in items:
            if item.experience.experience_id in left_out:
                state.leave_out(item, "the training step of the original lineage failed with this experience")
        rest = [item for item in items if item.experience.experience_id not in left_out]
        if not rest:
            return (), None
        isolated = prepare_isolated(
            rest, lambda items: prepare(items, state, settings.advantage, self._decay, loss=settings.loss)
        )
        for item, reason in isolated.culprits:
            state.leave_out(item, reason)
        return isolated.items, isolated.prepared

    def _publish(self) -> None:
        state, settings, history = self._state, self._settings, self._state.history
        version = _version(settings.model, history.next_number, history.head, history.head_step + 1, state.steps)
        keep = {history.versions[0].version}
        state.history, self._weights_changed = history.with_version(version, keep, VERSIONS_MAX), False
        state.evict_old_entries(_START)
        if len(self._branches) > 2 * len(state.window):
            self._branches = {name: self._branches[name] for name in state.window if name in self._branches}

    def _count(self) -> None:
        self._outcomes.update(outcome.dropped for outcome in self._state.outcomes)
        self._state.take_report()


def changes_weights(batch: Batch, settings: TrainerSettings) -> bool:
    """Return whether a step on `batch` would change the weights.

    It would not if all advantages are 0 and no other term of the loss, such as a divergence, has a gradient. Then no
    back end applies momentum.
    """
    loss, needs = settings.loss, settings.needs
    pulled = loss.kl > 0 or loss.function.correction is not None or needs.critic or needs.teacher or needs.hindsight
    return pulled or any(row.has_advantage for row in batch.rows)


def _version(model: str, number: int, parent: str | None, first: int, last: int) -> PublishedVersion:
    """Return a version of the dry run, which has a name and steps but no files."""
    digest = hashlib.sha256(f"dry run {number}".encode()).hexdigest()
    manifest = BlobRef(uri="none", sha256=digest, size=0)
    name = f"{model}@{digest[:16]}"
    return PublishedVersion(
        version=name, parent=parent, number=number, manifest=manifest, first_step=first, last_step=last
    )


def _shape(base: Path) -> tuple[int, int]:
    """Return vocabulary size and context length of the model in `base`, from its configuration."""
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


if __name__ == "__main__":
    SERVICE.main()
