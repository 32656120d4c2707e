"""Placeholders for the names of vLLM that Trinity's explorer imports, for an environment without vLLM.

`trinity.common.models.mm_utils` imports them even if no engine is started. Calling a placeholder raises an error that
vLLM is missing.
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
        raise ModuleNotFoundError(
            f"{type(self).__name__} belongs to vLLM, which is not installed in Trinity's environment"
        )


class _Finder(MetaPathFinder, Loader):
    """Finder for the modules that the explorer imports. The finder is last on the path."""

    _NAMES = ("vllm", "vllm.config", "vllm.entrypoints", "vllm.entrypoints.chat_utils", "vllm.inputs")

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module is empty."""


sys.meta_path.append(_Finder())
