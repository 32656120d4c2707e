# mypy: implicit-reexport
"""Public path of `headrace_integrations.scenarios.games`."""

from headrace_integrations.scenarios.games import *
