"""Judge and preferences under the names of AgentScope's article: public path of `headrace_integrations.judging`."""

from headrace_integrations.judging import *
from headrace_integrations.judging import __all__ as __all__
