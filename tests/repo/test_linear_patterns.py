"""Tests that every regular expression of Headrace takes linear time on texts that slow down a backtracking engine."""

from __future__ import annotations

import ast
import functools
import random
import re
import string
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from headrace.rewards.natural_signals import _similarity
from headrace_schemas.values.ids import _expression
from headrace_schemas.values.text import closest

FUNCTIONS = frozenset({"compile", "match", "fullmatch", "search", "findall", "finditer", "split", "sub", "subn"})
_FROM_THE_START = frozenset({"match", "fullmatch"})
_ALPHABET = " \n\t-.,'\"_:/@*#1aZé中\x00!"
_QUICK_S = 0.004
_LENGTH = 2_000
_GROWTH_MAX = 9.0
"""Of the time when the text becomes four times as long: 4 when it is linear, 16 when it is quadratic."""
_TRIES = 4
_SHORT_LENGTHS = (16, 20, 24, 30, 40, 60, 100, 200, 400, 800)
_SHORT_MAX_S = 0.01


@dataclass(frozen=True, slots=True)
class Use:
    """Regular expression in our source. `pattern` is None if it is built at run time."""

    path: str
    line: int
    owner: str
    """The name that it is bound to, or the function that it stands in."""
    pattern: str | bytes | None
    flags: int
    methods: frozenset[str]

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.owner


@functools.cache
def uses(path: str) -> Sequence[Use]:
    tree = ast.parse((ROOT / path).read_text(), path)
    names = _constants(tree)
    called = _methods_by_name(tree)
    expressions = []
    for owner, call in _calls(tree):
        assert isinstance(call.func, ast.Attribute)
        methods = {call.func.attr} if call.func.attr != "compile" else called.get(owner) or set(FUNCTIONS)
        flags = [word.value for word in call.keywords if word.arg == "flags"]
        position = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(call.func.attr, 2)
        flags += call.args[position : position + 1]
        expressions.append(
            Use(
                path,
                call.lineno,
                owner,
                _value(call.args[0], names) if call.args else None,
                int(_value(flags[0], names) or 0) if flags else 0,
                frozenset(methods) - {"compile"},
            )
        )
    return expressions


def slowest(pattern: str | bytes, flags: int, methods: frozenset[str], seed: int) -> tuple[float, str] | None:
    """Return the growth of the time and a shortened repr of the first text with superlinear time, or None."""
    compiled = re.compile(pattern, flags)
    runs = [_runner(compiled, method) for method in sorted(_ways(methods))]
    for prefix, pump, suffix in _attacks(compiled, random.Random(seed)):
        for run in runs:
            growth = _growth(run, prefix, pump, suffix, is_bytes=isinstance(pattern, bytes))
            if growth > _GROWTH_MAX:
                return growth, f"{prefix!r} + {pump!r} * n + {suffix!r}"
    return None


def _growth(run: Callable[[Any], object], prefix: str, pump: str, suffix: str, *, is_bytes: bool) -> float:
    def text(length: int) -> str | bytes:
        attack = prefix + pump * (length // len(pump)) + suffix
        return attack.encode() if is_bytes else attack

    for length in _SHORT_LENGTHS:
        if all(_seconds(run, text(length)) > _SHORT_MAX_S for _ in range(2)):
            return float("inf")  # exponential, or of a high degree: the full length would take for ever
    short, long = text(_LENGTH), text(4 * _LENGTH)
    best = float("inf")
    for _ in range(_TRIES):
        long_s = _seconds(run, long)
        if long_s < _QUICK_S:
            return 4.0
        best = min(best, long_s / max(min(_seconds(run, short) for _ in range(3)), 1e-6))
        if best <= _GROWTH_MAX:
            return best
    return best


def _seconds(run: Callable[[Any], object], text: str | bytes) -> float:
    start = time.process_time()
    run(text)
    return time.process_time() - start


def _ways(methods: frozenset[str]) -> set[str]:
    anchored = set(methods & _FROM_THE_START)
    return anchored | ({"finditer"} if methods - _FROM_THE_START else set())


def _runner(compiled: re.Pattern[Any], method: str) -> Callable[[Any], object]:
    if method == "finditer":
        return lambda text: sum(1 for _ in compiled.finditer(text))
    run: Callable[[Any], object] = getattr(compiled, method)
    return run


# What is repeated: samples of each run of neighbouring parts of the expression, at any depth.


def _attacks(compiled: re.Pattern[Any], source: random.Random) -> Iterator[tuple[str, str, str]]:
    pattern = compiled.pattern.decode("latin-1") if isinstance(compiled.pattern, bytes) else compiled.pattern
    tree = parser.parse(pattern, compiled.flags & ~(re.UNICODE if isinstance(compiled.pattern, bytes) else 0))
    attacks: dict[tuple[str, str, str], None] = {}
    for before, part in _parts(list(tree), []):
        for _ in range(3):
            pump = _sample(part, source)[:24]
            prefix = _sample(before, source)[:40]
            if pump:
                for start, end in ((prefix, "\x00"), ("", "\x00"), (prefix, "")):
                    attacks[start, pump, end] = None
    yield from attacks


def _parts(nodes: list[Any], before: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    for start in range(len(nodes)):
        for end in range(start + 1, min(len(nodes), start + 12) + 1):
            yield before + nodes[:start], nodes[start:end]
        for inner in _inside(nodes[start]):
            yield from _parts(list(inner), before + nodes[:start])


def _inside(node: Any) -> list[Any]:
    kind, value = node
    if kind is op.SUBPATTERN:
        return [value[3]]
    if kind is op.ATOMIC_GROUP:
        return [value]
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return [value[2]]
    if kind is op.BRANCH:
        return list(value[1])
    if kind in (op.ASSERT, op.ASSERT_NOT):
        return [value[1]]
    return []


def _sample(nodes: Any, source: random.Random) -> str:
    return "".join(_sample_of(node, source) for node in nodes)


def _sample_of(node: Any, source: random.Random) -> str:
    kind, value = node
    if kind is op.LITERAL:
        return chr(value)
    if kind in (op.NOT_LITERAL, op.ANY, op.IN):
        candidates = [letter for letter in _ALPHABET if _takes(kind, value, letter)]
        if kind is op.IN:
            candidates += [chr(item) for name, item in value if name is op.LITERAL and value[0][0] is not op.NEGATE]
            candidates += [chr(item[0]) for name, item in value if name is op.RANGE and value[0][0] is not op.NEGATE]
        return source.choice(candidates) if candidates else ""
    if kind is op.BRANCH:
        return _sample(source.choice(value[1]), source)
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        least, most, inner = value
        times = source.randint(least, min(most, least + 2))
        return "".join(_sample(inner, source) for _ in range(min(times, 16)))
    if kind in (op.ASSERT, op.ASSERT_NOT, op.AT, op.GROUPREF):
        return ""
    return "".join(_sample(inner, source) for inner in _inside(node))


def _takes(kind: Any, value: Any, letter: str) -> bool:
    if kind is op.ANY:
        return True
    if kind is op.NOT_LITERAL:
        return bool(ord(letter) != value)
    negated = bool(value) and value[0][0] is op.NEGATE
    return any(_is_member(item, letter) for item in value if item[0] is not op.NEGATE) != negated


_CATEGORIES: Mapping[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdigit,
    op.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdigit(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    op.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    op.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


def _is_member(item: Any, letter: str) -> bool:
    kind, value = item
    if kind is op.LITERAL:
        return bool(ord(letter) == value)
    if kind is op.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    return _CATEGORIES[value](letter)


# Reading the source: module constants are put together without importing anything.


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    def walk(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            name = owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = child.name
            elif owner == "" and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                name = child.targets[0].id
            if isinstance(child, ast.Call) and _is_re(child.func):
                yield name, child
            yield from walk(child, name)

    yield from walk(tree, "")


def _is_re(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr in FUNCTIONS
    )


def _methods_by_name(tree: ast.Module) -> dict[str, set[str]]:
    methods: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(value, ast.Name):
                methods.setdefault(value.id, set()).add(node.attr)
    return methods


def _constants(tree: ast.Module) -> dict[str, Any]:
    names: dict[str, Any] = {"re": re, "string": string}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, names)
            if isinstance(value, str | bytes | int):
                names[node.targets[0].id] = value
    return names


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.Expression(node), "source", "eval"), {"__builtins__": {"map": map}}, names)
    except Exception:  # noqa: BLE001 - not a constant
        return None


ROOT = Path(__file__).parents[2]
SEED = 20261126
NOT_OUTSIDE = ("tests/", "docs/site/", "benchmarks/", "deploy/")
"""These read our own pages, sources and figures."""
PUT_TOGETHER: dict[tuple[str, str], tuple[str, ...]] = {
    ("packages/operations/src/headrace_operations/evaluation/measures.py", "_mentions"): (
        r"(?<!\w)m1(?!\w)",
        r"(?<!\w)a\-a\ a(?!\w)",
    ),
    ("examples/email_agent/demonstrations.py", "_reading"): (
        r" on (\w+day)", r"room (\d+)", r"^(\w+\.pdf)$", r"extension (\d+)", r"\A(\w+ \w+)$", r"^(\d+) mails",
    ),
    ("schemas/src/headrace_schemas/values/errors.py", "__init__"): ("abab|abac|aaaa", r"4711\-4711|a\ a\ a"),
    ("packages/integrations/src/headrace_integrations/scenarios/games.py", "mentioned_player"): (
        "wolf_1|wolf_2|villager_1",
        "$^",
    ),
    ("services/inference/src/headrace_inference/chat/plain.py", "_STAND_IN"): ("012301230123([0-9]{6})",),
    ("services/inference/src/headrace_inference/chat/plain.py", "_any_of"): (r"<\|im_start\|>|<\|im_end\|>|<a>|<",),
    ("services/inference/src/headrace_inference/grammar/forms.py", "_pieces"): ("(</tool_call>|<tool_call>|\n)",),
    ("schemas/src/headrace_schemas/values/ids.py", "_compile"): tuple(
        map(_expression, ("*", "judge:*", "*a*a*a*a*b", "a*b*c*d*e", "**a**", "*:*:*"))
    ),
}  # fmt: skip
"""Examples of the patterns that are built while the program runs."""


def _tracked(expression: str) -> list[str]:
    """Return the tracked Python files that contain a match of the extended regular expression."""
    command = ["git", "grep", "--files-with-matches", "--extended-regexp", expression, "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [path for path in listed.split() if not path.startswith(NOT_OUTSIDE)]


PATHS = _tracked(r"\bre\.(" + "|".join(sorted(FUNCTIONS)) + r")\b")
"""Files that call `re`. The tests parse them, as each process that collects tests would otherwise parse all sources."""


@pytest.mark.parametrize("path", PATHS)
def test_patterns_take_linear_time(path: str) -> None:
    for use in uses(path):
        patterns = (use.pattern,) if use.pattern is not None else PUT_TOGETHER.get(use.key)
        place = f"{path}:{use.line} in {use.owner}"
        assert patterns, f"{place}: state in PUT_TOGETHER what this pattern looks like"
        for pattern in patterns:
            attack = slowest(pattern, use.flags, use.methods, SEED)
            assert attack is None, (
                f"{place}: {pattern!r}: four times the text takes {attack[0]:.1f} times as long on {attack[1]}"
            )


def test_difflib_is_used_in_its_two_bounded_places() -> None:
    assert set(_tracked("^(import|from) difflib")) == {
        "schemas/src/headrace_schemas/values/text.py",
        "packages/client/src/headrace/rewards/natural_signals.py",
    }


@pytest.mark.parametrize("word", ["a ", "a b ", "b a ", "\ufdfa", "a"])
def test_comparisons_of_texts_are_bounded(word: str) -> None:
    text = word * 1_000_000
    start = time.process_time()
    _similarity(text, text[1:] + "x")
    closest(text, [text[1:], "x" * 60])
    closest("ab" * 30, ["ba" * 30 + str(number) for number in range(100_000)])
    assert time.process_time() - start < 1.0


def test_patterns_of_fields_use_the_linear_engine() -> None:
    """Pydantic uses Rust's linear engine by default; `regex_engine="python-re"` would backtrack."""
    assert _tracked("python-re") == []


def test_put_together_names_patterns_that_exist() -> None:
    assert set(PUT_TOGETHER) <= {use.key for path in PATHS for use in uses(path) if use.pattern is None}


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"\b[\w.-]*(?:password|token)\s*[=:]", "search"),
        (r"(a+)+b", "match"),
        (r"(?:a|aa)+$", "fullmatch"),
        (r"^\s*step\b", "sub"),
        (r"\s+$", "search"),
        (r"<tool>(.*?)</tool>", "findall"),
        (r"\w+@\w+\.com", "search"),
        (r"(.*),(.*),(.*);", "fullmatch"),
    ],
)
def test_slow_patterns_are_caught(pattern: str, method: str) -> None:
    flags = re.MULTILINE | re.DOTALL
    assert slowest(pattern, flags, frozenset({method}), SEED) is not None


@pytest.mark.parametrize("pattern", [r"\w+", r"a\s++b", r"[^\s'\"]+", r'"[^"]*"', r"^\d{1,18}$"])
def test_linear_patterns_pass(pattern: str) -> None:
    assert slowest(pattern, 0, frozenset({"search", "match"}), SEED) is None
