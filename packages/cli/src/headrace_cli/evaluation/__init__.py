"""Plays tasks with one exact version and measures what comes of it: `headrace evaluate`, and a gate's program."""

from __future__ import annotations

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "headrace_cli.evaluation.asking": ("Asking", "Playthrough"),
        "headrace_cli.evaluation.runner": ("evaluate",),
        "headrace_cli.evaluation.task_metrics": ("TaskMetric",),
    },
)
