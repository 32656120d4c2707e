"""Comparison of two versions: files and settings, scores, logprobs of the same tokens, and greedy answers to a fixed
set of prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from headrace.errors import HeadraceError, Unreachable
from headrace_schemas.http.registry_api import VersionState
from headrace_schemas.values.blobs import Fingerprint, Manifest

_VALUE_LENGTH_MAX = 200
_SCORES = ("score", "difference", "anchor_difference", "tasks")
PROMPTS = (
    "Say hello in one short sentence.",
    "What is 17 + 25? Answer with the number alone.",
    "List three colours, separated by commas.",
    "Summarize in one sentence: The meeting was moved from Monday to Tuesday because the room was taken.",
    "Translate to French: good morning",
    "Is the following friendly or unfriendly? 'Thanks a lot for your help!' Answer with one word.",
    "Write a JSON object with the key name and the value Ada.",
    "I cannot log in to my account. What should I do first?",
)
_TOKENS_MAX = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs between two versions. None means that the version does not have it."""

    what: str
    """Path of the file or name of the setting."""
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Absolute differences between two versions' logprobs of the same tokens: number of tokens, mean, maximum."""

    tokens: int
    mean: float
    most: float


def compare_settings(
    before_manifest: Manifest, after_manifest: Manifest, read: Callable[[Manifest, str], bytes]
) -> Iterator[Change]:
    """Yield the differences of kind, base and origin, of files, and of each value in configuration files.

    Args:
        before_manifest: the manifest of the first version.
        after_manifest: the manifest of the second version.
        read: returns the content of the file at a path of a version.
    """
    for field in ("kind", "base", "lineage", "step", "parent"):
        before, after = (_text(getattr(manifest, field)) for manifest in (before_manifest, after_manifest))
        if before != after:
            yield Change(field, before, after)
    before_files, after_files = (
        {file.path: file.blob for file in manifest.files} for manifest in (before_manifest, after_manifest)
    )
    for path in sorted({*before_files, *after_files}):
        if before_files.get(path) == after_files.get(path):
            continue
        if path not in before_files or path not in after_files:
            yield Change(path, _size(before_files, path), _size(after_files, path))
        elif path.endswith("config.json"):
            yield from _compare_values(path, read(before_manifest, path), read(after_manifest, path))
        else:
            yield Change(path, before_files[path].sha256[:12], after_files[path].sha256[:12])


def compare_scores(before: VersionState, after: VersionState) -> dict[str, tuple[float | None, float | None]]:
    """Return the latest scores of both versions by name; None for a version without that score."""
    before_scores, after_scores = _latest_scores(before), _latest_scores(after)
    return {
        name: (before_scores.get(name), after_scores.get(name))
        for name in _SCORES
        if name in before_scores or name in after_scores
    }


def compare_fingerprints(before: Fingerprint, after: Fingerprint) -> LogprobDifference | None:
    """Compare the fingerprints of two versions; None if they are about different tokens."""
    if before.token_ids != after.token_ids:
        return None
    differences = [abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)]
    return LogprobDifference(len(differences), math.fsum(differences) / len(differences), max(differences))


def _latest_scores(version: VersionState) -> dict[str, float]:
    statistics: dict[str, float] = {}
    for event in version.decisions:
        statistics |= event.statistics
    return statistics


def _compare_values(path: str, before: bytes, after: bytes) -> Iterator[Change]:
    try:
        before_settings, after_settings = _flatten(json.loads(before)), _flatten(json.loads(after))
    except (ValueError, RecursionError):
        yield Change(path, "not JSON", "not JSON")
        return
    for name in sorted({*before_settings, *after_settings}):
        if before_settings.get(name) != after_settings.get(name):
            yield Change(f"{path}: {name}", before_settings.get(name), after_settings.get(name))


def _flatten(value: Any, name: str = "") -> dict[str, str]:
    """Return the leaf values of nested tables by dotted name; a list is one value."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)[:_VALUE_LENGTH_MAX]}
    return {
        inner: text
        for key, entry in value.items()
        for inner, text in _flatten(entry, f"{name}.{key}" if name else str(key)).items()
    }


def _size(files: Mapping[str, Any], path: str) -> str | None:
    return f"{files[path].size} bytes" if path in files else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Answers of two versions to one prompt."""

    prompt: str
    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


def compare_answers(base_url: str, before: str, after: str, key: str | None) -> tuple[AnswerPair, ...]:
    """Request the answers of both versions to all prompts at temperature 0, as evaluation traffic.

    Args:
        base_url: the URL of the gateway with `/v1`.
        before: the first version, `name@digest`.
        after: the second version.
        key: the API key, or None.

    Raises:
        HeadraceError: a version is not served.
        Unreachable: the gateway does not answer.
    """
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
            return tuple(AnswerPair(text, _answer(http, before, text), _answer(http, after, text)) for text in PROMPTS)
    except httpx2.TransportError as error:
        raise Unreachable(f"{base_url}: {error}") from error


def _answer(http: httpx2.Client, version: str, prompt: str) -> str:
    body = {
        "model": version,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": _TOKENS_MAX,
    }
    answer = http.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise HeadraceError(f"{version}: does not answer ({answer.text[:300]}); serve it first")
    return str(answer.json()["choices"][0]["message"]["content"] or "")
