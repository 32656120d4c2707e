"""HelloAgents' training tool: public path of `headrace_integrations.hello_agents`."""

from headrace_integrations.hello_agents import *
from headrace_integrations.hello_agents import __all__ as __all__
