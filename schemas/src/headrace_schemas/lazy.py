"""Lazy public names of a package (PEP 562), so that importing the package imports little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a pair of functions `__getattr__` and `__dir__` for `package` that import a public name on first use.

    Args:
        package: the full name of the package.
        modules: the public names by the module that defines them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        attribute: object = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, attribute)  # so that the next access does not call this function
        return attribute

    return get, lambda: sorted(module_of)
