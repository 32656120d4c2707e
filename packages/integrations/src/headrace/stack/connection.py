# mypy: implicit-reexport
"""Public path of `headrace_integrations.stack.connection`."""

from headrace_integrations.stack.connection import *
