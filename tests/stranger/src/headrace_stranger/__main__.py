"""Entry point of the service `echo`: `python -m headrace_stranger`."""

from headrace_runtime.main import Service
from headrace_stranger.service import INFO, EchoSettings

SERVICE = Service("echo", INFO.summary, EchoSettings, "headrace_stranger.app:run")

if __name__ == "__main__":
    SERVICE.main()
