# mypy: implicit-reexport
"""Public path of `headrace_integrations.scenarios.maths`."""

from headrace_integrations.scenarios.maths import *
