"""Trinity's external model, made whole: its runners look for an actor of the model, and nobody has made one."""

from __future__ import annotations

import os
from typing import Any

import ray
from trinity.common.models.allocator import Allocator
from trinity.utils.monitor import TensorboardMonitor

BASE_URL = "HEADRACE_BENCH_URL"
"""The variable that the YAML names (`model.external_model`): without /v1."""


class Monitor(TensorboardMonitor):  # type: ignore[misc]
    """Trinity's own, which starts the actor first: it is made in the explorer's process, before the runners are."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any) -> None:
        super().__init__(project, group, name, role, config)
        actor = Allocator(config.explorer).get_actor_name("rollout", 0, 0)
        options = {"name": actor, "namespace": config.ray_namespace, "num_cpus": 0}
        self._model = ray.remote(_Model).options(**options).remote()


class _Model:
    """What runners and explorer ask a model's actor. Who plays asks the gateway itself."""

    def get_model_version(self) -> int:
        """Trinity counts steps; the version of ours is in the model's name."""
        return 0

    def get_api_server_url(self) -> str:
        return os.environ[BASE_URL]

    def shutdown(self) -> None:
        """There is nothing to end."""
