"""Supervisor of the services, each in its own process: the library behind `headrace up`."""

from headrace.errors import UsageError
from headrace_operations.supervisor.process import Limits
from headrace_operations.supervisor.state import NotRunning, RunState, ServiceState, StartFailed, read
from headrace_operations.supervisor.supervisor import Supervisor

__all__ = ["Limits", "NotRunning", "RunState", "ServiceState", "StartFailed", "Supervisor", "UsageError", "read"]
