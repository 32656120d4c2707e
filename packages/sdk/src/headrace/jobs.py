"""Offline training from a program: what `headrace train` does. Needs `headrace-cli`, when it is used."""

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {"headrace_cli.jobs": ("Job", "RowOptions", "run")})
