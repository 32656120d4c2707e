"""Import of the user's modules from kept text, so that a digest covers all code that a reward function runs.

A module belongs to the user's code if its file is in the folder of a reward file, or in the package of a reward module.
Such modules are read once, when the functions are loaded: those that are imported then, and those that an import
statement names anywhere in them. Later imports, and processes that start later, use the kept text, whatever is on the
disk by then.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source, resolve_name, spec_from_file_location
from os.path import relpath
from pathlib import Path
from types import CodeType, ModuleType

MODULES_MAX = 1024
CHARACTERS_MAX = 16 * 1024 * 1024
_FOREIGN = frozenset({"site-packages", "dist-packages"})


class KeptModules(MetaPathFinder):
    """The user's modules by file. One instance is active in a process: it replaces the one before it.

    Args:
        sources: text of each file that was kept before. With any, nothing more is read from the disk.
    """

    def __init__(self, sources: dict[str, str] | None = None) -> None:
        self.sources = dict(sources or {})
        self.sealed = bool(sources)
        self._bases: list[tuple[Path, str, Path]] = []
        """Folders that modules are looked for in, the first name of these modules (empty: all names), and the folder
        or file that the user's modules are in."""
        self._edges: dict[str, set[str]] = {}
        self._loading: list[str] = []
        self._data: dict[str, None] = {}

    def activate(self) -> None:
        """Become the process's finder, and forget modules that another instance made."""
        for finder in [one for one in sys.meta_path if isinstance(one, KeptModules)]:
            sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _KeptLoader):
                del sys.modules[name]
        sys.meta_path.insert(0, self)
        global _active
        _active = self

    def add_base(self, base: Path, first_name: str = "", root: Path | None = None) -> None:
        """Regard modules in `root`, else in `base`, as the user's; with `first_name` only that module or package."""
        if (base, first_name, root or base) not in self._bases:
            self._bases.append((base, first_name, root or base))

    def text(self, path: str) -> str:
        """Return the kept text of a file, which is read the first time.

        Raises:
            ImportError: nothing more may be read, or there is too much.
            OSError: the file cannot be read.
        """
        if path not in self.sources:
            if self.sealed:
                raise ImportError(
                    f"{path} was not imported when the reward functions were loaded; import it with a statement, or "
                    "reload the functions"
                )
            self.sources[path] = decode_source(Path(path).read_bytes())
            if len(self.sources) > MODULES_MAX or sum(map(len, self.sources.values())) > CHARACTERS_MAX:
                raise ImportError(
                    f"reward functions import more than {MODULES_MAX} modules or {CHARACTERS_MAX} characters of "
                    "source; install the package that they need"
                )
        return self.sources[path]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the user; None for all others."""
        del target
        if fullname in sys.builtin_module_names:
            return None
        folders = (
            [str(base) for base, first, _ in self._bases if first in ("", fullname)] if path is None else list(path)
        )
        tail = fullname.rpartition(".")[2]
        for folder in folders:
            base = f"{folder}/{tail}"
            for file, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
                if file in self.sources:
                    return self._spec(fullname, file, [base] if is_package else None)
            if self._owns(base) and any(file.startswith(f"{base}/") for file in self.sources):
                spec = ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [base]
                return spec
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None or not self._owns(found.origin):
            return None
        if not found.origin.endswith(".py"):
            self._data[found.origin] = None
            return None
        return self._spec(fullname, found.origin, found.submodule_search_locations)

    def entry(self, name: str, path: str, locations: Sequence[str] | None) -> ModuleSpec:
        """Return the spec of a reward module, which has a name of its own."""
        return self._spec(name, path, locations)

    def execute(self, module: ModuleType, path: str) -> None:
        """Run a module's kept text, and keep the modules that its import statements name."""
        text = self.text(path)
        if self._loading:
            self._edges.setdefault(self._loading[-1], set()).add(path)
        self._keep_imports(path, module.__package__ or "")
        code = compile(text, path, "exec")
        self._loading.append(path)
        try:
            exec(code, module.__dict__)  # noqa: S102 (running the user's code is the point)
        finally:
            self._loading.pop()

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a module: of its text, or of the texts of all modules of the user that it imports."""
        covered, pending = {path}, [path]
        while pending:
            for other in self._edges.get(pending.pop(), ()):
                if other not in covered:
                    covered.add(other)
                    pending.append(other)
        if covered == {path}:
            return sha256(self.sources[path].encode()).hexdigest()
        folder = str(Path(path).parent)
        lines = sorted(f"{relpath(one, folder)} {sha256(self.sources[one].encode()).hexdigest()}" for one in covered)
        return sha256("\n".join(lines).encode()).hexdigest()

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Return files of the user that were read and are no Python source; no digest covers them."""
        return tuple(self._data)[:MODULES_MAX]

    def note_read(self, path: object) -> None:
        """Record a file that was opened while modules were loaded."""
        if self._loading and isinstance(path, str) and not path.endswith((".py", ".pyc")):
            absolute = str(Path(path).absolute())
            if self._owns(absolute) and Path(absolute).is_file():
                self._data[absolute] = None

    def _spec(self, name: str, path: str, locations: Sequence[str] | None) -> ModuleSpec:
        spec = spec_from_file_location(
            name,
            path,
            loader=_KeptLoader(self, path),
            submodule_search_locations=list(locations) if locations else None,
        )
        assert spec is not None
        return spec

    def _owns(self, path: str) -> bool:
        place = Path(path)
        return any(
            place.is_relative_to(root) and _FOREIGN.isdisjoint(place.relative_to(root).parts)
            for _, _, root in self._bases
        )

    def _keep_imports(self, path: str, package: str) -> None:
        """Keep the modules that the import statements of a kept file name, and those that these name."""
        pending = [(path, package)]
        while pending:
            file, package = pending.pop()
            for other, of_other in self._imports(file, package):
                self._edges.setdefault(file, set()).add(other)
                if other not in self._edges:
                    self._edges[other] = set()
                    pending.append((other, of_other))

    def _imports(self, path: str, package: str) -> list[tuple[str, str]]:
        """Return the user's files that a file's import statements name, each with its package."""
        try:
            tree = ast.parse(self.text(path))
        except (SyntaxError, ValueError, RecursionError):
            return []
        names: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                try:
                    module = resolve_name("." * node.level + (node.module or ""), package)
                except ImportError:
                    continue
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        found = {}
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                located = self._locate(parts[:length])
                if located is not None:
                    found[located[0]] = located[1]
        return list(found.items())

    def _locate(self, parts: Sequence[str]) -> tuple[str, str] | None:
        """Return the file of a module of the user and its package; None where there is none."""
        for base, first, _ in self._bases:
            if first not in ("", parts[0]):
                continue
            place = base.joinpath(*parts)
            for file, package in (
                (place / "__init__.py", ".".join(parts)),
                (place.with_name(f"{place.name}.py"), ".".join(parts[:-1])),
            ):
                if str(file) in self.sources:
                    return str(file), package
                if not self.sealed and self._owns(str(file)) and file.is_file():
                    self.text(str(file))
                    return str(file), package
        return None


class _KeptLoader(Loader):
    """Loader of one module from its kept text. Tracebacks show that text."""

    def __init__(self, modules: KeptModules, path: str) -> None:
        self._modules = modules
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        self._modules.execute(module, self._path)

    def get_source(self, fullname: str) -> str:
        del fullname
        return self._modules.text(self._path)

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        return compile(self._modules.text(self._path), self._path, "exec")


_active: KeptModules | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _active is not None and arguments:
        _active.note_read(arguments[0])


sys.addaudithook(_audit)
