"""What one rank holds, and what it does with it when all ranks are told to. torch is in here.

Weights are whole in each rank or in parts (`shard`). Where they are in parts, every method is one that all ranks are in
at the same time; where they are whole, all ranks compute the same, and the first one says it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace_runtime.settings import complete
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, StepResult
from headrace_trainer.ray_learner import sharded as parts
from headrace_trainer.ray_learner.files import OPTIMIZER, WEIGHTS
from headrace_trainer.ray_learner.rank_team import RankTeam
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import tensors, version_files
from headrace_trainer.torch_learner.learner import TorchLearner, opened
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.rounding import rounded
from headrace_trainer.torch_learner.step import train

_GOING_ON = threading.Event()
"""A rank is not told to stop in the middle of a step: it is ended."""


class Held:
    """A rank's share of a learner."""

    def __init__(self, inner: TorchLearner, settings: TrainerSettings, team: RankTeam, number: int, peers: int) -> None:
        self._inner = inner
        self._settings = settings
        self._team = team
        self._first = number == 0
        self._peers = peers

    @classmethod
    def open(
        cls, folder: Path, table: Mapping[str, Any], number: int, ranks: int, peers: int, *, sharded: bool
    ) -> Held:
        """`table`: all of `[trainer]`. Raises `SettingError`."""
        settings = complete(TrainerSettings).model_validate(table)
        if sharded:
            parts.check(settings)
        inner = opened(folder, settings, parts.ShardedPolicy if sharded else Policy)
        torch.manual_seed(settings.seed)  # whatever this process has drawn before
        return cls(inner, settings, RankTeam(number, ranks, sharded=sharded), number, peers)

    @property
    def abilities(self) -> Abilities:
        return self._inner.abilities

    def sequence_bound(self) -> int:
        """Ranks of one machine share its memory; a GPU's belongs to one of them."""
        found = self._inner.sequence_bound()
        return max(2, found // self._peers) if self._inner.policy.device.type == "cpu" else found

    def step(self, batch: Batch, *, from_base: bool) -> StepResult:
        settings, inner = self._settings, self._inner
        return train(
            inner.policy,
            inner.optimizer,
            batch,
            settings.loss,
            settings.compute.pack_tokens,
            _GOING_ON,
            from_base=from_base,
            team=self._team,
        )

    def freeze(self, folder: Path | None) -> None:
        frozen = tensors.freeze(self._inner.policy, self._inner.optimizer, self._settings.lineage)
        if folder is not None:
            (folder / WEIGHTS).write_bytes(frozen.weights)
            (folder / OPTIMIZER).write_bytes(frozen.optimizer)

    def thaw(self, folder: Path, *, with_random: bool) -> None:
        """The files stay where they are, and each rank reads its own part of them."""
        weights, state = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
        tensors.restore(self._inner.policy, self._inner.optimizer, weights, state, with_random=with_random)

    def load(self, folder: Path) -> None:
        self._inner.load(folder)

    def write(self, folder: Path | None, base: str) -> Fingerprint | None:
        """Who has no folder only lends its part."""
        policy = self._inner.policy
        trained = policy.tensors()
        if policy.lora:
            if folder is not None:
                version_files.save_adapter(policy, folder, base, trained)
            return policy.fingerprint()
        dtype = self._inner.served_as
        weights = {name: rounded(tensor, dtype, name) for name, tensor in trained.items()} if self._first else trained
        if folder is not None:
            version_files.save_weights(policy, folder, weights)
        return policy.fingerprint(weights)

    def fingerprint_of_base(self) -> Fingerprint:
        return self._inner.fingerprint_of_base()
