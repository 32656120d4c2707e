"""Public path of the calls of agents in `headrace_integrations.practice.runs`."""

from headrace_integrations.practice.runs import asked as asked
from headrace_integrations.practice.runs import call_agent as call_agent
from headrace_integrations.practice.runs import plugged as plugged
from headrace_integrations.practice.runs import run_in_thread as run_in_thread
from headrace_integrations.practice.runs import text_of as text_of
