# mypy: implicit-reexport
"""Public path of `headrace_integrations.rl.serving`."""

from headrace_integrations.rl.serving import *
