# mypy: implicit-reexport
"""Public path of `headrace_integrations.hello_agents.data`."""

from headrace_integrations.hello_agents.data import *
