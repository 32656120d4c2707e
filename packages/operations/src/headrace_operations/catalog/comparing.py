"""Two versions side by side: files and settings, scores, and what both answer to the same tokens. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_schemas.manifest import Fingerprint, Manifest
from headrace_schemas.registry_api import VersionState

_VALUE_LENGTH_MAX = 200
_SCORES = ("score", "difference", "anchor_difference", "tasks")


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is otherwise in the second version. None: it is not there at all."""

    what: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Answers:
    """How far apart two versions' logprobs of the same tokens are; None where they have no tokens in common."""

    tokens: int
    mean: float
    most: float


def settings(one: Manifest, other: Manifest, read: Callable[[Manifest, str], bytes]) -> Iterator[Change]:
    """Kind and base, files, and each value of the JSON files that act."""
    for field in ("kind", "base", "lineage", "step", "parent"):
        before, after = (_text(getattr(manifest, field)) for manifest in (one, other))
        if before != after:
            yield Change(field, before, after)
    mine, theirs = ({file.path: file.blob for file in manifest.files} for manifest in (one, other))
    for path in sorted({*mine, *theirs}):
        if mine.get(path) == theirs.get(path):
            continue
        if path not in mine or path not in theirs:
            yield Change(path, _size(mine, path), _size(theirs, path))
        elif path.endswith("config.json"):
            yield from _values(path, read(one, path), read(other, path))
        else:
            yield Change(path, mine[path].sha256[:12], theirs[path].sha256[:12])


def scores(one: VersionState, other: VersionState) -> dict[str, tuple[float | None, float | None]]:
    """The last number that was found of each."""
    mine, theirs = _scores(one), _scores(other)
    return {name: (mine.get(name), theirs.get(name)) for name in _SCORES if name in mine or name in theirs}


def answers(one: Fingerprint, other: Fingerprint) -> Answers | None:
    """By the fingerprints, which every version has: the same tokens for the same vocabulary."""
    if one.token_ids != other.token_ids:
        return None
    apart = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    return Answers(len(apart), math.fsum(apart) / len(apart), max(apart))


def _scores(version: VersionState) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in version.decisions:
        found |= event.statistics
    return found


def _values(path: str, before: bytes, after: bytes) -> Iterator[Change]:
    try:
        mine, theirs = _flat(json.loads(before)), _flat(json.loads(after))
    except (ValueError, RecursionError):
        yield Change(path, "no JSON", "no JSON")
        return
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield Change(f"{path}: {name}", mine.get(name), theirs.get(name))


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Dotted names; lists are values."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)[:_VALUE_LENGTH_MAX]}
    return {
        inner: text
        for key, held in value.items()
        for inner, text in _flat(held, f"{name}.{key}" if name else str(key)).items()
    }


def _size(files: Mapping[str, Any], path: str) -> str | None:
    return f"{files[path].size} bytes" if path in files else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
