# mypy: implicit-reexport
"""Public path of `headrace_integrations.tuner.functions`."""

from headrace_integrations.tuner.functions import *
