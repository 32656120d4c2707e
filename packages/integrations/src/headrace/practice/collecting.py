# mypy: implicit-reexport
"""Public path of `headrace_integrations.practice.collecting`."""

from headrace_integrations.practice.collecting import *
