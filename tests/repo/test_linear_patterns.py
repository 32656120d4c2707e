"""No regular expression of Headrace takes more than linear time on any text."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from headrace.rewards.natural_signals import _alike
from headrace_schemas.values.sources import _expression
from headrace_schemas.values.text import closest
from tests.repo.pattern_attacks import Use, slowest, uses

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
        r" on (\w+day)",
        r"room (\d+)",
        r"^(\w+\.pdf)$",
        r"extension (\d+)",
        r"\A(\w+ \w+)$",
        r"^(\d+) mails",
    ),
    ("schemas/src/headrace_schemas/values/errors.py", "__init__"): ("abab|abac|aaaa", r"4711\-4711|a\ a\ a"),
    ("packages/integrations/src/headrace_integrations/scenarios/games.py", "mentioned_player"): (
        "wolf_1|wolf_2|villager_1",
        "$^",
    ),
    ("services/inference/src/headrace_inference/chat/plain.py", "_STAND_IN"): ("012301230123([0-9]{6})",),
    ("services/inference/src/headrace_inference/chat/plain.py", "_any_of"): (r"<\|im_start\|>|<\|im_end\|>|<a>|<",),
    ("services/inference/src/headrace_inference/grammar/forms.py", "_pieces"): ("(</tool_call>|<tool_call>|\n)",),
    ("schemas/src/headrace_schemas/values/sources.py", "_compiled"): tuple(
        map(_expression, ("*", "judge:*", "*a*a*a*a*b", "a*b*c*d*e", "**a**", "*:*:*"))
    ),
}
"""Examples of the patterns that are built while the program runs."""


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split() if not path.startswith(NOT_OUTSIDE)]


USES = list(uses(ROOT, _tracked()))


def _id(use: Use) -> str:
    return f"{use.path}:{use.line}"


@pytest.mark.parametrize("use", USES, ids=_id)
def test_pattern_takes_linear_time(use: Use) -> None:
    patterns = (use.pattern,) if use.pattern is not None else PUT_TOGETHER.get(use.key)
    assert patterns, f"{_id(use)} in {use.owner}: state in PUT_TOGETHER what this pattern looks like"
    for pattern in patterns:
        attack = slowest(pattern, use.flags, use.methods, SEED)
        assert attack is None, f"{pattern!r}: four times the text takes {attack[0]:.1f} times as long on {attack[1]}"


def test_difflib_is_used_in_its_two_bounded_places() -> None:
    users = {
        path for path in _tracked() if re.search(r"^(?:import|from) difflib", (ROOT / path).read_text(), re.MULTILINE)
    }
    assert users == {
        "schemas/src/headrace_schemas/values/text.py",
        "packages/client/src/headrace/rewards/natural_signals.py",
    }


@pytest.mark.parametrize("word", ["a ", "a b ", "b a ", "\ufdfa", "a"])
def test_comparisons_of_texts_are_bounded(word: str) -> None:
    text = word * 1_000_000
    start = time.process_time()
    _alike(text, text[1:] + "x")
    closest(text, [text[1:], "x" * 60])
    closest("ab" * 30, ["ba" * 30 + str(number) for number in range(100_000)])
    assert time.process_time() - start < 1.0


def test_patterns_of_fields_use_the_linear_engine() -> None:
    """Pydantic's default is Rust's engine; `regex_engine="python-re"` would backtrack."""
    users = {path for path in _tracked() if "python-re" in (ROOT / path).read_text()}
    assert users == set()


def test_put_together_names_patterns_that_exist() -> None:
    assert set(PUT_TOGETHER) <= {use.key for use in USES if use.pattern is None}


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
