"""Import of the user's modules from a snapshot of their source, so that a digest covers all code of a reward function.

A module belongs to the user's code if its file is in the folder of a reward file, or in the package of a reward module.
The snapshot is taken when the functions are loaded. It contains the modules that are imported then, and those that any
import statement in them names. Later imports, and processes that start later, use the snapshot even if the files have
changed.
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


class ModuleSnapshot(MetaPathFinder):
    """Source texts of the user's modules, and the import finder that loads modules from these texts.

    One snapshot is active in a process at a time.

    Args:
        sources: text of each file of an earlier snapshot. If this is not empty, no other file is read from the disk.
    """

    def __init__(self, sources: dict[str, str] | None = None) -> None:
        self.sources = dict(sources or {})
        self.sealed = bool(sources)
        self._bases: list[tuple[Path, str, Path]] = []
        """Folders to search for modules, each with the top-level name of its modules (empty: any name) and the folder
        or file whose modules belong to the user."""
        self._edges: dict[str, set[str]] = {}
        self._loading: list[str] = []
        self._data: dict[str, None] = {}
        self._namespaces: set[str] = set()
        """Namespace packages that this instance found. Their modules do not have its loader."""

    def activate(self) -> None:
        """Make this snapshot the active one, and remove the modules that another snapshot has imported."""
        for finder in [finder for finder in sys.meta_path if isinstance(finder, ModuleSnapshot)]:
            sys.meta_path.remove(finder)
        global _active
        for name in _active._namespaces if _active is not None else ():
            sys.modules.pop(name, None)
        for name, module in list(sys.modules.items()):
            if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _SnapshotLoader):
                del sys.modules[name]
        sys.meta_path.insert(0, self)
        _active = self

    def add_base(self, base: Path, first_name: str = "", root: Path | None = None) -> None:
        """Add a folder whose modules belong to the user.

        Args:
            base: folder to search.
            first_name: the only module or package to search for. Empty: any name.
            root: folder or file that the user's modules are in. By default `base`.
        """
        if (base, first_name, root or base) not in self._bases:
            self._bases.append((base, first_name, root or base))

    def text(self, path: str) -> str:
        """Return the text of a file. The first call reads it from the disk.

        Raises:
            ImportError: the snapshot is complete and does not have the file, or it has become too large.
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
        """Return the import spec of a module that belongs to the user, or None for any other module."""
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
                namespace = ModuleSpec(fullname, None, is_package=True)
                namespace.submodule_search_locations = [base]
                self._namespaces.add(fullname)
                return namespace
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not self._owns(spec.origin):
            return None
        if not spec.origin.endswith(".py"):
            self._data[spec.origin] = None
            return None
        return self._spec(fullname, spec.origin, spec.submodule_search_locations)

    def entry(self, name: str, path: str, locations: Sequence[str] | None) -> ModuleSpec:
        """Return the import spec, under the name `name`, for the module that contains a reward function."""
        return self._spec(name, path, locations)

    def execute(self, module: ModuleType, path: str) -> None:
        """Run a module, and add the modules that its import statements name to the snapshot."""
        text = self.text(path)
        if self._loading:
            self._edges.setdefault(self._loading[-1], set()).add(path)
        self._add_imports(path, module.__package__ or "")
        code = compile(text, path, "exec")
        self._loading.append(path)
        try:
            exec(code, module.__dict__)  # noqa: S102 (running the user's code is the point)
        finally:
            self._loading.pop()

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a module's text and of the texts of all modules of the user that it imports."""
        covered, pending = {path}, [path]
        while pending:
            for other in self._edges.get(pending.pop(), ()):
                if other not in covered:
                    covered.add(other)
                    pending.append(other)
        if covered == {path}:
            return sha256(self.sources[path].encode()).hexdigest()
        folder = str(Path(path).parent)
        lines = sorted(f"{relpath(file, folder)} {sha256(self.sources[file].encode()).hexdigest()}" for file in covered)
        return sha256("\n".join(lines).encode()).hexdigest()

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Files of the user that are not Python source and were read during loading. No digest covers their content."""
        return tuple(self._data)[:MODULES_MAX]

    def note_read(self, path: object) -> None:
        """Record that user code opened a file while modules were loaded."""
        if self._loading and isinstance(path, str) and not path.endswith((".py", ".pyc")):
            absolute = str(Path(path).absolute())
            if self._owns(absolute) and Path(absolute).is_file():
                self._data[absolute] = None

    def _spec(self, name: str, path: str, locations: Sequence[str] | None) -> ModuleSpec:
        spec = spec_from_file_location(
            name,
            path,
            loader=_SnapshotLoader(self, path),
            submodule_search_locations=list(locations) if locations else None,
        )
        assert spec is not None
        return spec

    def _owns(self, path: str) -> bool:
        file = Path(path)
        return any(
            file.is_relative_to(root) and _FOREIGN.isdisjoint(file.relative_to(root).parts)
            for _, _, root in self._bases
        )

    def _add_imports(self, path: str, package: str) -> None:
        """Add the modules that the import statements of a file name to the snapshot, and recursively their imports."""
        pending = [(path, package)]
        while pending:
            file, package = pending.pop()
            for other, of_other in self._imports(file, package):
                self._edges.setdefault(file, set()).add(other)
                if other not in self._edges:
                    self._edges[other] = set()
                    pending.append((other, of_other))

    def _imports(self, path: str, package: str) -> list[tuple[str, str]]:
        """Return the user's files that the import statements of a file import, each with the name of its package."""
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
        packages = {}
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                located = self._locate(parts[:length])
                if located is not None:
                    packages[located[0]] = located[1]
        return list(packages.items())

    def _locate(self, parts: Sequence[str]) -> tuple[str, str] | None:
        """Return the file and the package of a module, or None if the module does not belong to the user."""
        for base, first, _ in self._bases:
            if first not in ("", parts[0]):
                continue
            stem = base.joinpath(*parts)
            for file, package in (
                (stem / "__init__.py", ".".join(parts)),
                (stem.with_name(f"{stem.name}.py"), ".".join(parts[:-1])),
            ):
                if str(file) in self.sources:
                    return str(file), package
                if not self.sealed and self._owns(str(file)) and file.is_file():
                    self.text(str(file))
                    return str(file), package
        return None


class _SnapshotLoader(Loader):
    """Loader of one module from the snapshot. Tracebacks show the text of the snapshot."""

    def __init__(self, modules: ModuleSnapshot, path: str) -> None:
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


_active: ModuleSnapshot | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _active is not None and arguments:
        _active.note_read(arguments[0])


sys.addaudithook(_audit)
