"""`python -m tests.system` lists the test programs; `python -m tests.system NAME [ARGUMENTS]` runs one of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tests.system.program import MODULES, run_program


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, *(f"  {name:14} {summary(name)}" for name in MODULES), sep="\n")
        return 0
    name, *rest = arguments
    if name not in MODULES:
        print(f"no test program is called {name!r}; there are {', '.join(MODULES)}", file=sys.stderr)
        return 2
    return run_program(name, rest)


def summary(name: str) -> str:
    """Return the first docstring line of a program's module, without importing the program's requirements."""
    spec = importlib.util.find_spec(MODULES[name])
    assert spec is not None
    assert spec.origin is not None
    first = Path(spec.origin).read_text(encoding="utf-8").partition("\n")[0]
    return first.strip('"').removesuffix(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
