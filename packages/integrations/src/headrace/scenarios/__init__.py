"""Trainers for maths, tool use and games: public path of `headrace_integrations.scenarios`."""

from headrace_integrations.scenarios import *
from headrace_integrations.scenarios import __all__ as __all__
