"""Checks whether a service could start, without starting it: `python -m headrace_<service> --check`.

The checks change nothing, except for a temporary folder by which they find out whether `data_dir` can be written.
Checks of a single service are in the function that its `Service.check` names.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.services import SERVICES
from headrace_runtime.settings.sections import Common
from headrace_schemas.values.text import is_storable

Check = Callable[[Common, Any], Awaitable[list[str]]]
"""Check of a single service. It returns one sentence per problem, or raises a `HeadraceError`."""
_CONNECT_S = 5.0


async def find_problems(name: str, common: Common, settings: object, check: Check | None, *, bus: bool) -> list[str]:
    """Return one sentence for each problem that would prevent a start of the service.

    Args:
        name: the name of the service.
        common: the common settings.
        settings: the settings of the service.
        check: the service's own check, or None.
        bus: whether to check that the bus responds and has suitable topics.
    """
    problems: list[str] = []
    checks: list[Awaitable[list[str]]] = [_data_dir(common), _blobs(common)]
    if name in SERVICES.names() and SERVICES.get(name).database:
        checks.append(_database(common))
    if bus:
        checks.append(_bus(common))
    if check is not None:
        checks.append(check(common, settings))
    for pending in checks:
        try:
            problems += await pending
        except HeadraceError as error:
            problems.append(str(error))
    return [" ".join(sentence.split()) for sentence in problems]


async def _data_dir(common: Common) -> list[str]:
    """Check that the folder `data_dir`, or its nearest existing parent, can be written."""
    folder = common.data_dir.absolute()
    if not is_storable(str(folder)):
        raise SettingError("data_dir", str(folder), "must not contain NUL or lone surrogates; remove these characters")
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise SettingError("data_dir", str(folder), f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise SettingError("data_dir", str(folder), f"{nearest} cannot be written to")
        with tempfile.TemporaryDirectory(prefix=".headrace-check-", dir=nearest):  # `os.access` is wrong about /proc
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError("data_dir", str(folder), f"cannot be used: {reason}; name another folder") from None
    return []


async def _blobs(common: Common) -> list[str]:
    from headrace_runtime.storage.blobs import BlobStore

    try:
        BlobStore.open(common)
    except HeadraceError:
        raise
    except Exception as error:  # noqa: BLE001 (a file system's library may raise anything for its address)
        raise SettingError("blobs.url", common.blobs.url, f"{type(error).__name__}: {error}") from None
    return []


async def _database(common: Common) -> list[str]:
    from sqlalchemy import text

    from headrace_runtime.storage.database import Database

    if common.database.url.get_secret_value() == "sqlite":  # a file under data_dir
        return []
    database = Database.open("check", common)
    try:
        async with asyncio.timeout(_CONNECT_S), database.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
    except TimeoutError:
        return [f"setting database.url: the server did not respond within {_CONNECT_S:g} s; is it running?"]
    except Exception as error:  # noqa: BLE001 (drivers have their own exceptions; the URL is left out because of its password)
        cause = getattr(error, "orig", None) or error
        return [f"setting database.url: {type(cause).__name__}: {cause}"]
    finally:
        await database.close()
    return []


async def _bus(common: Common) -> list[str]:
    from headrace_runtime.kafka import topics

    await topics.check(common.bus, _CONNECT_S)
    return []
