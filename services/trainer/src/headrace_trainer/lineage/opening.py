"""Opens a lineage, or begins a new one. Blocks; runs in the training thread."""

from __future__ import annotations

from pathlib import Path

from headrace_runtime.clock import Clock
from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint, TrainingMetrics
from headrace_schemas.values.blobs import File, Manifest
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.backends import BACKENDS
from headrace_trainer.experiences.admission import limits_of
from headrace_trainer.experiences.history import History, PublishedVersion
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.window import Window
from headrace_trainer.learner import VERSION, Learner
from headrace_trainer.lineage import versions
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.saved import SavedState, Tensors
from headrace_trainer.lineage.store import LineageStore, LineageTaken, replayed_versions
from headrace_trainer.lineage.versions import share_weights
from headrace_trainer.settings import TrainerSettings

log = get_logger(__name__)


def check_start(settings: TrainerSettings, blobs: BlobStore) -> None:
    """Check that `open_lineage` will accept the settings, before the lineage is taken over from its present owner.

    Raises:
        SettingError: the settings contradict the saved lineage or the base.
    """
    versions.check_base(Path(settings.base))
    blobs.check_exclusive()
    saved = LineageStore(blobs, settings.lineage).read()
    if saved is not None:
        _check_settings(settings, saved)
        first = files.read_manifest(blobs, saved.versions[0].manifest)
        versions.check_same_base(Path(settings.base), first, settings.lineage)


def open_lineage(
    settings: TrainerSettings, blobs: BlobStore, clock: Clock, store: LineageStore | None = None
) -> Lineage:
    """Continue a lineage from its last save, or publish the base as version 0 and start from there.

    Args:
        store: store of a lineage that this process owns. None: the lineage is taken over at once.

    Raises:
        SettingError: the settings are not those of the saved lineage.
        CorruptBlob: the saved state is damaged. It is never repaired by guessing.
        Unavailable: the saved state cannot be read.
    """
    base = Path(settings.base)
    versions.check_base(base)
    if store is None:
        store = LineageStore(blobs, settings.lineage)
        if not store.take_over():
            raise LineageTaken(
                f"lineage {settings.lineage}: another process has just taken it over; stop one of the two"
            )
    saved = store.load()
    first = files.read_manifest(blobs, saved.versions[0].manifest) if saved else None
    if saved is not None and first is not None:
        _check_settings(settings, saved)
        versions.check_same_base(base, first, settings.lineage)
    # The folder is not read again: from here on the lineage's base is the files in the store, by their digests.
    contents = first.files if first else versions.store_base_files(blobs, base)
    with versions.open_files(blobs, contents) as folder:
        learner = BACKENDS.get(settings.backend).open(folder, settings)
    try:
        if saved is None or first is None:
            first, saved = _begin_lineage(settings, blobs, store, contents, clock, learner)
            log.info("lineage_begins", lineage=settings.lineage, version=first.version)
        else:
            with store.open_tensors(saved.present) as folder:
                learner.restore(folder, with_random=True)
            log.info("lineage_continues", lineage=settings.lineage, head=saved.head, steps=saved.steps)
            saved = saved.model_copy(update={"health": saved.health.with_limits(settings.health)})
        state = _restore_state(settings, learner, saved, replayed_versions(settings, blobs))
    except BaseException:
        learner.close()
        raise
    return Lineage(settings, clock, blobs, store, first, learner, state, saved)


def _begin_lineage(
    settings: TrainerSettings,
    blobs: BlobStore,
    store: LineageStore,
    contents: tuple[File, ...],
    clock: Clock,
    learner: Learner,
) -> tuple[Manifest, SavedState]:
    name, lineage, now = settings.model, settings.lineage, clock.now()
    manifest, ref = versions.publish_base(blobs, contents, learner, name=name, lineage=lineage)
    copy = learner.copy(None)
    with store.scratch() as folder:
        copy.write(folder)
        versions.fetch_weights(blobs, manifest, folder / VERSION)
        weights, assembly = store.store_weights(folder, share_weights(folder), manifest.files)
        present = Tensors(weights=weights, optimizer=store.store_optimizer(folder), assembly=assembly)
    copy.drop()
    version = manifest.version
    saved = SavedState(
        model=name,
        lineage=lineage,
        kind=learner.abilities.kind,
        offsets={},
        waiting=(),
        window={},
        versions=(PublishedVersion(version=version, parent=None, number=0, manifest=ref),),
        head=version,
        head_step=0,
        promoted=(version,),
        baselines=Baselines(),
        steps=0,
        account=0,
        present=present,
        restore_points={version: present},
        checkpoint=Checkpoint(time=now, model=name, version=version, lineage=lineage, step=0, manifest=ref),
        metrics=TrainingMetrics(time=now, model=name, lineage=lineage, step=0, account=0, version=version),
    )
    store.save(saved)
    return manifest, saved


def _check_settings(settings: TrainerSettings, saved: SavedState) -> None:
    if saved.model != settings.model:
        raise SettingError("trainer.model", settings.model, f"lineage {saved.lineage} trains {saved.model}")
    if saved.offsets and settings.topic not in saved.offsets:
        raise SettingError(
            "trainer.topic",
            settings.topic,
            f"lineage {saved.lineage} reads {', '.join(sorted(saved.offsets))}; name a new trainer.lineage",
        )
    kind = "lora" if settings.lora.rank else "full"
    if saved.kind != kind:
        raise SettingError(
            "trainer.lora.rank",
            settings.lora.rank,
            f"lineage {saved.lineage} is trained as {saved.kind}; choose another trainer.lineage",
        )


def _restore_state(
    settings: TrainerSettings, learner: Learner, saved: SavedState, replayed_versions: dict[str, int]
) -> LineageState:
    abilities = learner.abilities
    context = abilities.context
    if settings.memory.sequence_tokens is None:
        pair = 2 if settings.advantage.signals.paired else 1  # both answers of a comparison share one forward pass
        context = min(context, learner.sequence_bound() // pair)
        log.info("sequence_bound", tokens=min(context, settings.memory.queue_tokens), context=abilities.context)
    limits = limits_of(settings, abilities.vocabulary, context)
    for outcome in saved.refused:
        log.warning("waiting_experience_refused", experience=outcome.experience_id, problem=outcome.detail)
    return LineageState(
        History(saved.versions, saved.head, saved.head_step, replayed_versions, frozenset(saved.excluded)),
        limits,
        settings.memory,
        baselines=saved.baselines,
        window=Window(saved.window),
        waiting=saved.waiting,
        offsets={topic: dict(offsets) for topic, offsets in saved.offsets.items()},
        promoted=saved.promoted,
        steps=saved.steps,
        outcomes=(*saved.unreported.outcomes, *saved.refused),
        undone=saved.unreported.undone,
        restored=saved.unreported.restored,
        left_out=saved.left_out,
    )
