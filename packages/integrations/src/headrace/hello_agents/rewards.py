# mypy: implicit-reexport
"""Public path of `headrace_integrations.hello_agents.rewards`."""

from headrace_integrations.hello_agents.rewards import *
