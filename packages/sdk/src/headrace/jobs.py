"""Offline training jobs for programs, as `headrace train` runs them. Needs the package `headrace-cli` when it is
used."""

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {"headrace_cli.jobs": ("Job", "RowOptions", "run")})
