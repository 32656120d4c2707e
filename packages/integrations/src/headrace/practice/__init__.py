"""Training on tasks: public path of `headrace_integrations.practice`."""

from headrace_integrations.practice import *
from headrace_integrations.practice import __all__ as __all__
