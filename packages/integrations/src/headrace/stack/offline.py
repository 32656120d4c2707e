# mypy: implicit-reexport
"""Public path of `headrace_integrations.stack.attaching`."""

from headrace_integrations.stack.attaching import *
