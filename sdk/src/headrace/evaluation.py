"""Tasks and metrics on one exact version: what `headrace evaluate` does. Needs `headrace-cli`, when it is used."""

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__, {"headrace_cli.evaluation": ("Asking", "Playthrough", "TaskMetric", "evaluate")}
)
