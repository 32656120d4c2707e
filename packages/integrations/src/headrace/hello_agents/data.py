"""Public path of the data sets of `headrace_integrations.hello_agents.tool`."""

from headrace_integrations.hello_agents.tool import FORMATS as FORMATS
from headrace_integrations.hello_agents.tool import load_rows as load

__all__ = ["FORMATS", "load"]
