"""Evaluate one exact version on held-out tasks: metrics with confidence intervals, and the same as a gate program.

    result = await evaluate(stack, tasks, play, {"accuracy": is_right}, version=stack.serving())
    print(result.means["accuracy"])  # 0.71 (0.62 to 0.79, 96 plays)

All calls have the purpose `eval`, so that they are never trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace_integrations.evaluation.evaluating import EvaluatedVersion, MetricMean, evaluate
    from headrace_integrations.evaluation.gate_program import serve_gate
    from headrace_statistics.intervals import interval
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "headrace_integrations.evaluation.evaluating": ("EvaluatedVersion", "MetricMean", "evaluate"),
            "headrace_integrations.evaluation.gate_program": ("serve_gate",),
            "headrace_statistics.intervals": ("interval",),
        },
    )

__all__ = ["EvaluatedVersion", "MetricMean", "evaluate", "interval", "serve_gate"]
