"""Public names that are imported when they are asked for (PEP 562), so that importing a package imports little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazily(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `package`. `modules` maps each module to the public names that it holds."""
    home = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, found)  # the next look finds it there
        return found

    return get, lambda: sorted(home)
