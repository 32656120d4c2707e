# mypy: implicit-reexport
"""Public path of `headrace_integrations.trinity.wrappers`."""

from headrace_integrations.trinity.wrappers import *
