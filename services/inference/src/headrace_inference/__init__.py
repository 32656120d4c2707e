"""Serves several immutable versions of language models at once, and reports the exact tokens that it sampled."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_inference",
    summary="Serves several immutable versions side by side and reports exactly what was sampled.",
    port=8010,
    consumes=("routing",),
    produces=("replicas",),
)
