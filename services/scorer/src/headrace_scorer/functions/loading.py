"""Finds and checks reward functions. Runs in the process that will call them, never in the service itself.

Modules are made from source text. So a restarted process runs the code of its predecessor, even if the files have
changed since. `POST /reload` changes all processes together, or none.
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
from headrace_scorer.functions.kept_modules import KeptModules

PARAMETERS = ("trajectory", "feedback", "context")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
REWARDS: Registry[object] = Registry("rewards", object, "reward function")


class LoadError(Exception):
    """A function cannot be used; the message says which and why."""


class RewardFunction(BaseModel):
    """A loaded function. `digest` is the SHA-256 of its file's source, or of the sources of all modules from the file's
    folder that it imports (`kept_modules`)."""

    name: str
    spec: str
    parameters: tuple[str, ...]
    asynchronous: bool
    digest: str

    @property
    def source(self) -> str:
        """Its name in the ledger."""
        return f"function:{self.name}"

    @property
    def looks_at_feedback(self) -> bool:
        """Whether new feedback may change its result."""
        return not {"feedback", "context"}.isdisjoint(self.parameters)


class FunctionLoader:
    """Makes functions from specs. `sources` holds the text of each file that was used, for the next process."""

    def __init__(self, sources: dict[str, str] | None = None) -> None:
        self.kept = KeptModules(sources)
        self.callables: dict[str, Callable[..., object]] = {}
        self._modules: dict[str, ModuleType] = {}

    @property
    def sources(self) -> dict[str, str]:
        """Return the text of each kept file."""
        return self.kept.sources

    def load(self, specs: Sequence[str]) -> list[RewardFunction]:
        """Raises `LoadError`."""
        self.kept.activate()
        found = []
        for spec in specs:
            module, attribute = self._find(spec)
            function = getattr(module, attribute, None)
            if not callable(function):
                raise LoadError(f"{spec}: {module.__file__} has no function {attribute!r}")
            name = attribute if ":" in spec else spec
            if name in self.callables:
                raise LoadError(f"{spec}: there are two functions named {name!r}; rename one")
            self.callables[name] = function
            found.append(
                RewardFunction(
                    name=name,
                    spec=spec,
                    parameters=_parameters(spec, function),
                    asynchronous=inspect.iscoroutinefunction(function),
                    digest=self.kept.digest(str(module.__file__)),
                )
            )
        self.kept.sealed = True
        return found

    def _find(self, spec: str) -> tuple[ModuleType, str]:
        place, _, attribute = _announced(spec).partition(":")
        if not place or not attribute.isidentifier():
            raise LoadError(f"{spec}: must be file.py:name or package.module:name")
        if place not in self._modules:
            self._modules[place] = self._make(spec, place)
        return self._modules[place], attribute

    def _make(self, spec: str, place: str) -> ModuleType:
        made = self._file_spec(place) if place.endswith(".py") else self._module_spec(spec, place)
        if made is None or made.origin is None or not made.origin.endswith(".py"):
            raise LoadError(f"{spec}: {place} is not a Python file or module here (in {Path.cwd()})")
        try:
            own = self.kept.entry(made.name, made.origin, made.submodule_search_locations)
            module = module_from_spec(own)
            sys.modules[made.name] = module
            self.kept.execute(module, made.origin)
        except BaseException as error:  # a module may do anything at import, also exit
            raise LoadError(f"{spec}: {type(error).__name__}: {error}") from error
        return module

    def _file_spec(self, place: str) -> ModuleSpec | None:
        path = Path(place).absolute()
        if str(path) not in self.kept.sources and not path.is_file():
            return None
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # so that it can import its neighbours
        self.kept.add_base(path.parent)
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
        """Keep the user's package; of an installed package only the folder of the reward module."""
        top = find_spec(first)
        if top is None or top.origin is None or not top.origin.endswith(".py"):
            return
        path = Path(top.origin)
        if path.name != "__init__.py":
            self.kept.add_base(path.parent, first, path)
            return
        installed = first.startswith("headrace") or not _INSTALLED.isdisjoint(path.parts)
        inner = name.split(".")[1:-1] if installed else ()
        self.kept.add_base(path.parent.parent, first, path.parent.joinpath(*inner))


def _announced(spec: str) -> str:
    """What a name without a colon stands for: not imported from there, but made from its source as any other."""
    if ":" in spec:
        return spec
    try:
        return REWARDS.point(spec).value
    except PluginError as error:
        raise LoadError(f"{spec}: must be file.py:name, package.module:name or a name: {error}") from None


def _parameters(spec: str, function: Callable[..., object]) -> tuple[str, ...]:
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    found = inspect.signature(function).parameters.values()
    for parameter in found:
        if parameter.name not in PARAMETERS or parameter.kind not in named:
            raise LoadError(f"{spec}: parameter {parameter}; a reward function takes any of {', '.join(PARAMETERS)}")
    return tuple(parameter.name for parameter in found)
