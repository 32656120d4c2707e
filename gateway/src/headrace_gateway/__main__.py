"""Program of the gateway: `python -m headrace_gateway`."""

from headrace_gateway import INFO
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.main import Service

SERVICE = Service(
    "gateway",
    INFO.summary,
    GatewaySettings,
    "headrace_gateway.app:run",
    "headrace_gateway.access.keys:check",
)

if __name__ == "__main__":
    SERVICE.main()
