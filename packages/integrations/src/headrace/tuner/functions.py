# mypy: implicit-reexport
"""Public path of `headrace_integrations.tuner.configs`."""

from headrace_integrations.tuner.configs import *
