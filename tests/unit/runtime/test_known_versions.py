"""What a gateway knows of versions and of the algorithms that train them, from announcements alone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from headrace_runtime.kafka.known_versions import KnownVersions
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.values.blobs import BlobRef

SFT = LearnedSignals(algorithm="sft", rewards=False, edits=True, preferences=False, logprobs=False)
KTO = LearnedSignals(algorithm="kto", rewards=True, edits=True, preferences=True, logprobs=False)


def checkpoint(version: str, lineage: str, learns: LearnedSignals | None = None, model: str = "m") -> Checkpoint:
    blob = BlobRef(uri="memory://none", sha256="0" * 64, size=1)
    return Checkpoint(
        time=datetime(2026, 1, 1, tzinfo=UTC), model=model, version=version, lineage=lineage, step=0, manifest=blob,
        learns=learns,
    )  # fmt: skip


def test_the_last_announcement_of_a_models_trainer_counts_for_versions_of_its_lineage(tmp_path: Path) -> None:
    async def refuse(_record: Record, error: Exception) -> None:
        raise error

    versions = KnownVersions(BusSettings(), "test", BlobStore(tmp_path.as_uri()), refuse)
    first, later, job = (f"m@{digit * 16}" for digit in "123")
    assert versions.signals_of("m", first) is None
    versions.checkpoint("m", checkpoint(first, "main", SFT))
    versions.checkpoint("m", checkpoint(job, "of a job"))
    versions.checkpoint("other", checkpoint(first, "main", KTO, model="other"))
    assert versions.signals_of("m", first) == SFT
    assert versions.signals_of("m", later) == SFT, "it may have been announced after this gateway read it"
    assert versions.signals_of("m", job) is None, "the trainer drops it as foreign"
    versions.checkpoint("m", checkpoint(first, "main", KTO))
    assert versions.signals_of("m", first) == KTO, "the trainer was started with another algorithm"
