"""Generator of all mutants of the files named on standard input, one JSON object a line; runs in cosmic-ray's
environment.

The operators are cosmic-ray's, with two exceptions. Operators on `|` are left out: nearly all of them change
annotations, which are never evaluated here. Of the hundreds of operators that replace one arithmetic operator by
another, only likely typing errors are used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]
from cosmic_ray.mutating import MutationVisitor  # type: ignore[import-not-found]
from cosmic_ray.plugins import get_operator  # type: ignore[import-not-found]

_COMPARISONS = (
    ("Eq", "NotEq"), ("NotEq", "Eq"), ("Lt", "LtE"), ("Lt", "Gt"), ("LtE", "Lt"), ("LtE", "GtE"), ("Gt", "GtE"),
    ("Gt", "Lt"), ("GtE", "Gt"), ("GtE", "LtE"), ("Is", "IsNot"), ("IsNot", "Is"),
)  # fmt: skip
_ARITHMETIC = (("Add", "Sub"), ("Sub", "Add"), ("Mul", "Div"), ("Div", "Mul"), ("FloorDiv", "Mul"), ("Mod", "Mul"))
OPERATORS = (
    *(f"ReplaceComparisonOperator_{old}_{new}" for old, new in _COMPARISONS),
    *(f"ReplaceBinaryOperator_{old}_{new}" for old, new in _ARITHMETIC),
    "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_USub_UAdd", "ZeroIterationForLoop", "ExceptionReplacer",
)  # fmt: skip

_NOT_CODE = ("@", "*,", "/,", "def ", "async def ", "class ", "import ", "from ", ")", '"""')
"""Beginnings of lines that are not mutated: decorators and signatures, whose types mypy checks."""

_GUARDS = ((" *, ", " /, "), ("strict=True", "strict=False"))
"""Texts that are not mutated: they only detect wrong callers, so that correct callers see no difference."""


def mutants(file: str) -> Iterator[dict[str, object]]:
    code = Path(file).read_text(encoding="utf-8")
    seen = {code}
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        count = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(get_ast(code)))
        for occurrence in range(count):
            changed = MutationVisitor(occurrence, operator).walk(get_ast(code)).get_code()
            old, new = code.splitlines(), changed.splitlines()
            if changed in seen:
                continue
            seen.add(changed)
            at = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
            if at is not None and _acts(old[at], new[at]):
                entry = {"line": at + 1, "original": old[at].strip(), "mutated": new[at].strip()}
                yield {"file": file, "operator": name, **entry, "text": changed}


def _acts(old: str, new: str) -> bool:
    alike = any(old.replace(*guard) == new for guard in _GUARDS)
    return not (alike or old.lstrip().startswith(_NOT_CODE))


if __name__ == "__main__":
    for named in sys.stdin.read().split():
        for mutant in mutants(named):
            print(json.dumps(mutant), flush=True)
