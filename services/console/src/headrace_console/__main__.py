"""`python -m headrace_console`."""

from headrace_console.service import INFO
from headrace_console.settings import ConsoleSettings
from headrace_runtime.main import Service

SERVICE = Service("console", INFO.summary, ConsoleSettings, "headrace_console.app:run")

if __name__ == "__main__":
    SERVICE.main()
