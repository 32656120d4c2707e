"""Connection options of Kafka clients: address and login of the bus."""

from __future__ import annotations

import logging
from typing import Any

from headrace.errors import Unreachable
from headrace_schemas.http.stack_access import login_for


def client_options(bus: str) -> dict[str, Any]:
    """Return options for an aiokafka client of the bus at `bus`.

    The login is taken from the environment (`HEADRACE_BUS__USERNAME`, `HEADRACE_BUS__PASSWORD`). For the bus of a stack
    in the data directory, it is the login of that stack.
    """
    login = login_for(bus)
    if login is None:
        return {"bootstrap_servers": bus}
    options: dict[str, Any] = {
        "bootstrap_servers": bus,
        "security_protocol": "SASL_SSL" if login.tls else "SASL_PLAINTEXT",
        "sasl_mechanism": login.mechanism,
        "sasl_plain_username": login.username,
        "sasl_plain_password": login.password,
    }
    if login.tls:
        from aiokafka.helpers import create_ssl_context

        options["ssl_context"] = create_ssl_context(cafile=login.ca_file or None)
    logging.getLogger("aiokafka.conn").addFilter(_is_not_plaintext_warning)
    return options


async def unreachable(bus: str, error: Exception) -> Unreachable:
    """Return an `Unreachable` error with its likely cause, for a client that could not connect."""
    from aiokafka.conn import create_conn
    from aiokafka.errors import KafkaError

    options = client_options(bus)
    del options["bootstrap_servers"]
    host, _, port = bus.split(",")[0].strip().rpartition(":")
    if not options or not port.isdecimal():
        return Unreachable(f"bus {bus}: {error}; is it running, and does it need a login (HEADRACE_BUS__PASSWORD)?")
    try:
        connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=5000, **options)
        connection.close()
    except KafkaError as problem:
        name = type(problem).__name__
        if "sasl" in name.lower() or "authentication" in name.lower():
            user = options["sasl_plain_username"]
            remedy = "set HEADRACE_BUS__USERNAME and HEADRACE_BUS__PASSWORD to a login of this bus"
            return Unreachable(f"bus {bus} refuses the login of user {user!r} ({name}); {remedy}")
    except OSError:
        pass
    return Unreachable(f"bus {bus}: {error}; is it running?")


def _is_not_plaintext_warning(record: logging.LogRecord) -> bool:
    """Return False for aiokafka's warning about a login without TLS.

    The settings have chosen such a login, and aiokafka repeats the warning at each connection.
    """
    return "in the clear" not in str(record.msg)
