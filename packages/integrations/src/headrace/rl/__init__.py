"""Names of AgentScope's article about agentic RL: public path of `headrace_integrations.rl`."""

from headrace_integrations.rl import *
from headrace_integrations.rl import __all__ as __all__
