# mypy: implicit-reexport
"""Public path of `headrace_integrations.scenarios.tool_use`."""

from headrace_integrations.scenarios.tool_use import *
