"""Starts every service as its own process, keeps it alive, and stops all of them: the library behind `headrace up`."""

from headrace.errors import UsageError
from headrace_cli.errors import NotRunning, StartFailed
from headrace_cli.supervisor.process import Limits
from headrace_cli.supervisor.state import RunState, ServiceState, read
from headrace_cli.supervisor.supervisor import Supervisor

__all__ = ["Limits", "NotRunning", "RunState", "ServiceState", "StartFailed", "Supervisor", "UsageError", "read"]
