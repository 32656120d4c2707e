"""The section `[trainer.ray]`, which can be read without ray and torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Section

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RaySettings(Section):
    """Ranks that share the steps of a lineage (`backend = "ray"`)."""

    address: str = ""
    """A running cluster, as `host:port` of its head, or `auto` for the one that this machine is part of. Headrace must
    be installed on its machines, with the same Python. Empty: the trainer starts a private one on this machine, and
    stops it at its end."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes that share a step, one per GPU. A lineage may continue with another number of them."""
    shard: Literal["none", "full"] = "none"
    """`none`: every rank holds the whole model. `full`: each holds a shard of weights, gradients and optimizer (FSDP2),
    for models that do not fit on one device."""
    start_timeout_s: Seconds = 300.0
    """How long cluster and ranks may take to start."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if "://" in address:
            raise SettingError(
                "trainer.ray.address",
                address,
                "set host:port of the cluster's head; the trainer must run on one of its machines",
            )
        return address
