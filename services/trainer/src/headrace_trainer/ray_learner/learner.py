"""The back end `ray`: a `Learner` whose weights and optimizer are in ranks. No tensor is in this process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.process.logs import get_logger
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abandoned, Abilities, StepResult
from headrace_trainer.ray_learner.copies import RayCopy
from headrace_trainer.ray_learner.ranks import Ranks
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from headrace_trainer.ray_learner.rank_learner import CopyReport

log = get_logger(__name__)


class RayLearner:
    """A learner on ranks. Equal settings, including the number of ranks, give equal bytes."""

    def __init__(self, ranks: Ranks, abilities: Abilities) -> None:
        self._ranks = ranks
        self._abilities = abilities
        self._copies = 0

    @classmethod
    def open(cls, folder: Path, settings: TrainerSettings) -> RayLearner:
        """Start ranks and open a learner on them. Raises `SettingError`, `Unavailable` and `LearnerLost`."""
        chosen = settings.of("ray")
        assert isinstance(chosen, RaySettings)
        ranks = Ranks(chosen, settings.compute)
        try:
            return cls.on(ranks, folder, settings)
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def on(cls, ranks: Ranks, folder: Path, settings: TrainerSettings) -> RayLearner:
        """Open a learner on existing ranks, which replaces any learner that they hold."""
        chosen = settings.of("ray")
        assert isinstance(chosen, RaySettings)
        nodes = [location.node for location in ranks.locations]
        table = settings.model_dump()
        with ranks.provide_files(folder) as folders:
            calls = [
                (rank_folder, table, chosen.shard, nodes.count(node))
                for rank_folder, node in zip(folders, nodes, strict=True)
            ]
            abilities, *_ = ranks.each("open", calls)
        log.info("ranks_open", ranks=len(nodes), machines=len(set(nodes)), shard=chosen.shard)
        return cls(ranks, abilities)

    @property
    def abilities(self) -> Abilities:
        return self._abilities

    @property
    def failure(self) -> str | None:
        return self._ranks.failure

    def sequence_bound(self) -> int:
        return int(min(self._ranks.all("sequence_bound")))

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        result: StepResult = self._ranks.all("step", self._ranks.shared(batch), from_base, stop=stop)[0]
        return result

    def copy(self, base: str | None) -> RayCopy:
        self._copies += 1
        copied: CopyReport = self._ranks.all("copy", self._copies, base)[0]
        return RayCopy(self._ranks, self._copies, copied.sizes, copied.fingerprint)

    def restore(self, folder: Path, *, with_random: bool) -> None:
        with self._ranks.provide_files(folder) as folders:
            self._ranks.each("restore", [(rank_folder, with_random) for rank_folder in folders])

    def load(self, folder: Path) -> None:
        with self._ranks.provide_files(folder) as folders:
            self._ranks.each("load", [(rank_folder,) for rank_folder in folders])

    def fingerprint_of_base(self) -> Fingerprint:
        answers: list[Fingerprint] = self._ranks.all("fingerprint_of_base")
        return answers[0]

    def close(self) -> None:
        self._ranks.close()
