# mypy: implicit-reexport
"""Public path of `headrace_integrations.stack.offline`."""

from headrace_integrations.stack.offline import *
