"""Loading of reward functions from source text, in the process that will call them.

A restarted process gets the source texts of its predecessor, so it runs the same code even if the files have changed.
`POST /reload` changes all processes together, or none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from headrace_runtime.registries import PluginError, Registry
from headrace_scorer.functions.module_snapshot import ModuleSnapshot

PARAMETERS = ("trajectory", "feedback", "context")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
REWARDS: Registry[object] = Registry("rewards", object, "reward function")


class LoadError(Exception):
    """Error of loading a reward function. The message names the function's spec and the reason."""


class RewardFunction(BaseModel):
    """Description of a loaded reward function.

    `digest` covers its source and the user's modules that it imports (`ModuleSnapshot`).
    """

    name: str
    spec: str
    parameters: tuple[str, ...]
    asynchronous: bool
    digest: str

    @property
    def source(self) -> str:
        """Name of the function as a source of rewards."""
        return f"function:{self.name}"

    @property
    def reads_feedback(self) -> bool:
        """Whether the function has a parameter that feedback may change, so that new feedback requires a new call."""
        return not {"feedback", "context"}.isdisjoint(self.parameters)


class FunctionLoader:
    """Loader of reward functions from their specs.

    Args:
        sources: text of each file that an earlier process loaded. By default the files are read from the disk.
    """

    def __init__(self, sources: dict[str, str] | None = None) -> None:
        self.modules = ModuleSnapshot(sources)
        self.callables: dict[str, Callable[..., object]] = {}
        self._loaded: dict[str, ModuleType] = {}

    @property
    def sources(self) -> dict[str, str]:
        """Text of each file that was loaded."""
        return self.modules.sources

    def load(self, specs: Sequence[str]) -> list[RewardFunction]:
        """Load the functions. Raises `LoadError` if one of them cannot be loaded."""
        self.modules.activate()
        functions = []
        for spec in specs:
            module, attribute = self._find(spec)
            function = getattr(module, attribute, None)
            if not callable(function):
                raise LoadError(f"{spec}: {module.__file__} has no function {attribute!r}")
            name = attribute if ":" in spec else spec
            if name in self.callables:
                raise LoadError(f"{spec}: there are two functions named {name!r}; rename one")
            self.callables[name] = function
            functions.append(
                RewardFunction(
                    name=name,
                    spec=spec,
                    parameters=_parameters(spec, function),
                    asynchronous=inspect.iscoroutinefunction(function),
                    digest=self.modules.digest(str(module.__file__)),
                )
            )
        self.modules.sealed = True
        return functions

    def _find(self, spec: str) -> tuple[ModuleType, str]:
        """Return the module that a spec names, and the name of the function in it."""
        location, _, attribute = _resolve_name(spec).partition(":")
        if not location or not attribute.isidentifier():
            raise LoadError(f"{spec}: must be file.py:name or package.module:name")
        if location not in self._loaded:
            self._loaded[location] = self._load_module(spec, location)
        return self._loaded[location], attribute

    def _load_module(self, spec: str, location: str) -> ModuleType:
        """Load the file or module `location` from its source text."""
        found_spec = self._file_spec(location) if location.endswith(".py") else self._module_spec(spec, location)
        if found_spec is None or found_spec.origin is None or not found_spec.origin.endswith(".py"):
            raise LoadError(f"{spec}: {location} is not a Python file or module here (in {Path.cwd()})")
        name, origin = found_spec.name, found_spec.origin
        try:
            module = module_from_spec(self.modules.entry(name, origin, found_spec.submodule_search_locations))
            sys.modules[name] = module
            self.modules.execute(module, origin)
        except BaseException as error:  # a module may do anything at import, also exit
            raise LoadError(f"{spec}: {type(error).__name__}: {error}") from error
        return module

    def _file_spec(self, file: str) -> ModuleSpec | None:
        path = Path(file).absolute()
        if str(path) not in self.modules.sources and not path.is_file():
            return None
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # so that the file can import its neighbours
        self.modules.add_base(path.parent)
        name = f"headrace_rewards_{sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
        return spec_from_file_location(name, path)

    def _module_spec(self, spec: str, name: str) -> ModuleSpec | None:
        first = name.partition(".")[0]
        try:
            if first not in sys.stdlib_module_names:
                self._add_package(first, name)
            return find_spec(name)
        except (ImportError, ValueError) as error:
            raise LoadError(f"{spec}: {error}") from error

    def _add_package(self, first: str, name: str) -> None:
        """Add the package of a reward module to the snapshot; of an installed package only the folder of the module."""
        top = find_spec(first)
        if top is None or top.origin is None or not top.origin.endswith(".py"):
            return
        path = Path(top.origin)
        if path.name != "__init__.py":
            self.modules.add_base(path.parent, first, path)
            return
        installed = first.startswith("headrace") or not _INSTALLED.isdisjoint(path.parts)
        inner = name.split(".")[1:-1] if installed else ()
        self.modules.add_base(path.parent.parent, first, path.parent.joinpath(*inner))


def _resolve_name(spec: str) -> str:
    """Return `spec`, or the `package.module:name` of the entry point if `spec` has no colon.

    The entry point is not imported; the function is loaded from source like any other.
    """
    if ":" in spec:
        return spec
    try:
        return REWARDS.point(spec).value
    except PluginError as error:
        raise LoadError(f"{spec}: must be file.py:name, package.module:name or a name: {error}") from None


def _parameters(spec: str, function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the function's parameters. Raises `LoadError` for a parameter that cannot be passed."""
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.name not in PARAMETERS or parameter.kind not in named:
            raise LoadError(f"{spec}: parameter {parameter}; a reward function takes any of {', '.join(PARAMETERS)}")
    return tuple(parameter.name for parameter in parameters)
