"""Options of Kafka clients: address, login and encryption."""

from __future__ import annotations

import logging
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.helpers import create_ssl_context

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import BusSettings

_CHECK_MS = 10_000
LOGIN_ERRORS = (
    AuthenticationFailedError, SaslAuthenticationFailed, UnsupportedSaslMechanismError, IllegalSaslStateError,
)  # fmt: skip


def client_options(settings: BusSettings) -> dict[str, Any]:
    """Return the options of an aiokafka client. Raises `OSError` if the certificate file cannot be read."""
    options: dict[str, Any] = {"bootstrap_servers": settings.address}
    if settings.tls:
        options["ssl_context"] = create_ssl_context(cafile=settings.ca_file or None)
    if password := settings.password.get_secret_value():
        options |= {
            "security_protocol": "SASL_SSL" if settings.tls else "SASL_PLAINTEXT",
            "sasl_mechanism": settings.mechanism,
            "sasl_plain_username": settings.username,
            "sasl_plain_password": password,
        }
        logging.getLogger("aiokafka.conn").addFilter(_is_unexpected)
    elif settings.tls:
        options["security_protocol"] = "SSL"
    return options


async def check_login(settings: BusSettings) -> None:
    """Try to log in at the first address of the bus. A bus that does not respond is ignored.

    Raises:
        SettingError: the bus refuses the login.
    """
    host, _, port = settings.address.split(",")[0].strip().rpartition(":")
    options = client_options(settings)
    del options["bootstrap_servers"]
    if not port.isdecimal() or not options:
        return
    try:
        connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=_CHECK_MS, **options)
        connection.close()
    except LOGIN_ERRORS as error:
        remedy = f"the bus {settings.address} refuses it for user {settings.username!r} ({type(error).__name__})"
        raise SettingError("bus.password", settings.password.get_secret_value(), remedy) from None
    except (KafkaError, OSError):
        return


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Filter out the warning about a login without TLS, which the settings request."""
    return "in the clear" not in str(record.msg)
