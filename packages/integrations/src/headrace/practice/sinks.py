# mypy: implicit-reexport
"""Public path of `headrace_integrations.practice.sinks`."""

from headrace_integrations.practice.sinks import *
