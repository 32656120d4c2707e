"""AgentScope's tuner: public path of `headrace_integrations.tuner`."""

from headrace_integrations.tuner import *
from headrace_integrations.tuner import __all__ as __all__
