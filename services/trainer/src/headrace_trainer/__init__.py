"""Learns from the stream: experiences become optimizer steps, optimizer steps become versions."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_trainer",
    summary="Learns from the stream of experiences.",
    port=8034,
    needs_setting="trainer.base",
    consumes=("experiences", "model-events"),
    produces=("checkpoints", "training-metrics"),
)
