"""Evaluation of one exact version on tasks, for `headrace evaluate` and for gate programs."""

from __future__ import annotations

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "headrace_operations.evaluation.asking": ("ModelClient", "Playthrough"),
        "headrace_operations.evaluation.runner": ("evaluate",),
        "headrace_operations.evaluation.tasks": ("TaskMetric",),
    },
)
