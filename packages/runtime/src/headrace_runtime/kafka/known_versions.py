"""Reader of the existing models and versions, and of the feedback signals that the trainer of each model learns from.

It reads the topics `checkpoints` and `routing`. Ingested trajectories are checked against it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from headrace_runtime.errors import CorruptBlob, InvalidEvent, Unavailable
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint, Routing
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.rules.ingest import KnownModels
from headrace_schemas.values.blobs import BlobRef

_VERSIONS_MAX = 100_000
"""Maximum number of remembered versions of one model. Beyond it the oldest are forgotten."""
_CONFIG_BYTES_MAX = 4 << 20
"""Size up to which the configuration of a model is read."""


class KnownVersions:
    """Models and versions that `checkpoints` and `routing` have announced so far.

    The task `run` keeps them current.
    """

    def __init__(
        self,
        bus: BusSettings,
        client_id: str,
        blobs: BlobStore,
        refuse: Callable[[Record, InvalidEvent], Awaitable[None]],
    ) -> None:
        self._blobs = blobs
        self._versions: dict[str, dict[str, str | None]] = {}
        """The versions of each model with the lineage that announced them, or None as long as it is not known."""
        self._manifests: dict[str, BlobRef] = {}
        self._vocabularies: dict[str, int | None] = {}
        self._signals: dict[str, tuple[str, LearnedSignals]] = {}
        """By model: the lineage with the newest announcement of learned signals, and these signals."""
        self._checkpoints = TopicTable(Checkpoint, bus, client_id, blobs, refuse, self.checkpoint)
        self._routings = TopicTable(Routing, bus, client_id, blobs, refuse, self.routing)

    async def run(self) -> None:
        """Follow the topics `checkpoints` and `routing` until cancelled, so that the models and versions stay
        current."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._checkpoints.run())
            group.create_task(self._routings.run())

    @property
    def loaded(self) -> bool:
        """Whether all events that existed at the start have been read."""
        return self._checkpoints.loaded.is_set() and self._routings.loaded.is_set()

    def checkpoint(self, _key: str, event: Checkpoint | None) -> None:
        """Add the version that an event of `checkpoints` announces, and the signals that its trainer learns from."""
        if event is not None:
            self._add_version(event.model, event.version, event.manifest, event.lineage)
            if event.learns is not None:
                self._signals[event.model] = event.lineage, event.learns

    def signals_of(self, model: str, version: str) -> LearnedSignals | None:
        """Return the signals that the trainer of `model` learns from in answers of `version`, or None if they are not
        known.

        None is also returned for a version of another lineage, whose answers the trainer drops with the reason
        `foreign_version`.
        """
        lineage, learns = self._signals.get(model, ("", None))
        own_lineage = self._versions.get(model, {}).get(version)
        return learns if own_lineage in (None, lineage) else None

    def routing(self, _key: str, event: Routing | None) -> None:
        """Add the versions that an event of `routing` contains."""
        for served in event.serve if event is not None else ():
            assert event is not None
            self._add_version(event.model, served.version, served.manifest)
        if event is not None:
            for version in (*event.aliases.values(), *event.withdrawn):
                self._add_version(event.model, version, None)

    async def models(self, model: str) -> KnownModels:
        """Return all models and versions, with the vocabulary size of `model` if it can be read.

        Raises:
            Unavailable: the topics have not been read to the end yet.
        """
        if not self.loaded:
            raise Unavailable("the existing versions have not been read yet; retry")
        if self._vocabularies.get(model) is None and model in self._manifests:
            self._vocabularies[model] = await asyncio.to_thread(self._vocabulary, self._manifests[model])
        sizes = {name: size for name, size in self._vocabularies.items() if size is not None}
        return KnownModels({name: versions.keys() for name, versions in self._versions.items()}, sizes)

    def _add_version(self, model: str, version: str, manifest: BlobRef | None, lineage: str | None = None) -> None:
        versions = self._versions.setdefault(model, {})
        versions[version] = lineage or versions.get(version)
        if len(versions) > _VERSIONS_MAX:
            del versions[next(iter(versions))]
        if manifest is not None:
            self._manifests[model] = manifest

    def _vocabulary(self, manifest: BlobRef) -> int | None:
        """Return the vocabulary size in the model's `config.json`, or None if it cannot be read.

        None is harmless, because the trainer checks token ids, too.
        """
        try:
            files = {file.path: file.blob for file in read_manifest(self._blobs, manifest).files}
            if files["config.json"].size > _CONFIG_BYTES_MAX:
                return None
            config = json.loads(self._blobs.get(files["config.json"]))
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        except (KeyError, ValueError, AttributeError, CorruptBlob, Unavailable, RecursionError):
            return None
        return size if isinstance(size, int) else None
