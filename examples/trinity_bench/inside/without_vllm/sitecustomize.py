"""On the path where Trinity's environment has no vLLM: names that Trinity's explorer imports stand in for vLLM's.

`trinity.common.models.mm_utils` takes them at its import, also where no engine is ever started. Whoever calls one of
them is told that there is no vLLM.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {})


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"{type(self).__name__} is vLLM's, which is not installed in Trinity's environment")


class _Finder(MetaPathFinder, Loader):
    """Last on the path, and for the two packages that the explorer takes names from."""

    _NAMES = ("vllm", "vllm.config", "vllm.entrypoints", "vllm.entrypoints.chat_utils", "vllm.inputs")

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.append(_Finder())
