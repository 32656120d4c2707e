"""The section `[trainer.ray]`. Light: read without ray and without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.settings import Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RaySettings(Section):
    """Ranks that share the steps of a lineage (`backend = "ray"`)."""

    address: str = ""
    """A running cluster, as `host:port` of its head, or `auto` for the one that this machine is part of. Headrace is
    installed on its machines, with the same Python. Empty: the trainer starts one of its own, on this machine alone,
    and stops it at its end."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes that share a step, one per GPU. A lineage may go on with another number of them."""
    shard: Literal["none", "full"] = "none"
    """`none`: every rank holds the whole model. `full`: each holds a part of weights, gradients and optimizer (FSDP2),
    for models that one device has no room for."""
    start_timeout_s: Seconds = 300.0
    """How long cluster and ranks may take until they can train."""
    collective_timeout_s: Seconds = 300.0
    """How long ranks wait for the slowest of them, between two sums. After that it is taken for hung."""
    call_timeout_s: Seconds = 3600.0
    """The longest that a step, or any other thing that is asked of the ranks, may take."""
    object_store_bytes: Annotated[int, Field(ge=80_000_000)] = 400_000_000
    """Shared memory of the cluster that the trainer starts. Weights pass through it in pieces."""

    @field_validator("address")
    @classmethod
    def _a_node_of_the_cluster(cls, address: str) -> str:
        if "://" in address:
            raise SettingError(
                "trainer.ray.address", address, "name host:port of the cluster's head, on one of whose machines we run"
            )
        return address
