"""Plays tasks with one exact version and measures what comes of it: `headrace evaluate`, and a gate's program."""

from __future__ import annotations

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "headrace_operations.evaluation.asking": ("Asking", "Playthrough"),
        "headrace_operations.evaluation.runner": ("evaluate",),
        "headrace_operations.evaluation.task_metrics": ("TaskMetric",),
    },
)
