# mypy: implicit-reexport
"""Public path of `headrace_integrations.hello_agents.tool`."""

from headrace_integrations.hello_agents.tool import *
