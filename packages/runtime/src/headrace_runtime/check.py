"""Finds what would stop a start, without starting: `python -m headrace_<service> --check`.

Nothing is changed; a temporary folder shows whether `data_dir` can be written.
What is a service's own is tried by its own function, `Service.check`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.services import SERVICES
from headrace_runtime.settings import Common
from headrace_schemas.text import is_storable

Check = Callable[[Common, Any], Awaitable[list[str]]]
"""Returns sentences about what is wrong; what it raises of our errors is one more."""
_CONNECT_S = 5.0


async def problems(name: str, common: Common, own: object, check: Check | None, *, bus: bool) -> list[str]:
    """Everything that is wrong for this service, a sentence each."""
    found: list[str] = []
    tried: list[Awaitable[list[str]]] = [_data_dir(common), _blobs(common)]
    if name in SERVICES.names() and SERVICES.get(name).database:
        tried.append(_database(common))
    if bus:
        tried.append(_bus(common))
    if check is not None:
        tried.append(check(common, own))
    for attempt in tried:
        try:
            found += await attempt
        except HeadraceError as error:
            found.append(str(error))
    return [" ".join(sentence.split()) for sentence in found]


async def _data_dir(common: Common) -> list[str]:
    """The folder itself, or the one in which it would be made, takes files."""
    folder = common.data_dir.absolute()
    if not is_storable(str(folder)):
        raise SettingError("data_dir", str(folder), "must not contain NUL or lone surrogates; remove these characters")
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise SettingError("data_dir", str(folder), f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise SettingError("data_dir", str(folder), f"{nearest} cannot be written to")
        with tempfile.TemporaryDirectory(prefix=".headrace-check-", dir=nearest):  # /proc lets nobody, whatever it says
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError("data_dir", str(folder), f"cannot be used: {reason}; name another folder") from None
    return []


async def _blobs(common: Common) -> list[str]:
    from headrace_runtime.blobs import BlobStore

    try:
        BlobStore.open(common)
    except HeadraceError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a file system's library makes of its address
        raise SettingError("blobs.url", common.blobs.url, f"{type(error).__name__}: {error}") from None
    return []


async def _database(common: Common) -> list[str]:
    from sqlalchemy import text

    from headrace_runtime.database import Database

    if common.database.url.get_secret_value() == "sqlite":  # a file under data_dir
        return []
    database = Database.open("check", common)
    try:
        async with asyncio.timeout(_CONNECT_S), database.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
    except TimeoutError:
        return [f"setting database.url: the server does not answer within {_CONNECT_S:g} s; is it running?"]
    except Exception as error:  # noqa: BLE001 - drivers have their own trees; the URL has a password and is not told
        cause = getattr(error, "orig", None) or error
        return [f"setting database.url: {type(cause).__name__}: {cause}"]
    finally:
        await database.close()
    return []


async def _bus(common: Common) -> list[str]:
    from headrace_runtime import topics

    await topics.check(common.bus, _CONNECT_S)
    return []
