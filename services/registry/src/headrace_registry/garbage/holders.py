"""What else of the registry's state needs a version. Whoever keeps versions in a table of its own adds a line here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

Holder = Callable[[AsyncConnection], Awaitable[Mapping[str, str]]]
"""Version to what needs it, in words."""

HOLDERS: tuple[Holder, ...] = ()
