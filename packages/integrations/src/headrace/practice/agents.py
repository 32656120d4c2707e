# mypy: implicit-reexport
"""Public path of `headrace_integrations.practice.agents`."""

from headrace_integrations.practice.agents import *
