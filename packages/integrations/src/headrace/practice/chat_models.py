# mypy: implicit-reexport
"""Public path of `headrace_integrations.practice.chat_models`."""

from headrace_integrations.practice.chat_models import *
