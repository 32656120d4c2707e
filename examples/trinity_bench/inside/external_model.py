"""Actor of the external model, which Trinity's runners look up but Trinity does not create."""

from __future__ import annotations

import os
from typing import Any

import ray
from trinity.common.models.allocator import Allocator
from trinity.utils.monitor import TensorboardMonitor

BASE_URL = "HEADRACE_BENCH_URL"
"""Environment variable that the YAML names (`model.external_model`), with the address without /v1."""


class Monitor(TensorboardMonitor):  # type: ignore[misc]
    """Trinity's monitor, which also creates the actor. Trinity creates its monitor in the explorer's process before the
    runners.
    """

    def __init__(self, project: str, group: str, name: str, role: str, config: Any) -> None:
        super().__init__(project, group, name, role, config)
        actor = Allocator(config.explorer).get_actor_name("rollout", 0, 0)
        options = {"name": actor, "namespace": config.ray_namespace, "num_cpus": 0}
        self._model = ray.remote(_Model).options(**options).remote()


class _Model:
    """Actor with the methods that runners and explorer call. Workflows call the gateway themselves."""

    def get_model_version(self) -> int:
        """Return 0, because Trinity counts steps while the version is part of the model's name."""
        return 0

    def get_api_server_url(self) -> str:
        return os.environ[BASE_URL]

    def shutdown(self) -> None:
        """Do nothing, because the actor owns no resources."""
