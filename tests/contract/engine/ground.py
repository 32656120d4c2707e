"""Ground of the engine's promises: an engine that serves two full versions and two adapters of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace_inference.engine import Engine, Sampling, Share, Start, Tokens
from headrace_inference.importing.native import load_model
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import Manifest
from tests.support import tiny_model

CONTEXT = 512
SEQUENCES_MAX, WAITING_MAX = 8, 8
RANK_MAX = 8


@dataclass(frozen=True)
class Stored:
    """A version's files."""

    manifest: Manifest
    folder: Path
    base: Path | None = None

    @property
    def version(self) -> str:
        return self.manifest.version


@dataclass(frozen=True)
class Versions:
    """`second` is trained from `first`; `adapter` and `other` apply to `first`."""

    blobs: BlobStore
    first: Stored
    second: Stored
    adapter: Stored
    other: Stored

    @property
    def all(self) -> tuple[Stored, ...]:
        return (self.first, self.second, self.adapter, self.other)


def build(root: Path) -> Versions:
    """Tiny ones, of float32."""
    blobs = BlobStore((root / "blobs").as_uri())

    def stored(folder: Path, base: Stored | None = None, **options: Any) -> Stored:
        below = (base.version, base.folder) if base else None
        served = tiny_model.publish(blobs, folder, base=below, **options)
        return Stored(versions.read_manifest(blobs, served.manifest), folder, base.folder if base else None)

    first = stored(tiny_model.build(root / "first"))
    moved = tiny_model.perturbed(first.folder, root / "second", seed=1)
    second = stored(moved, step=1, parent=first.version)
    first_version, second_version = (
        stored(
            tiny_model.adapter(first.folder, root / f"adapter{seed}", seed=seed),
            first,
            step=seed,
            parent=first.version,
        )
        for seed in (2, 3)
    )
    return Versions(blobs, first, second, first_version, second_version)


@dataclass(frozen=True)
class Ground:
    """An engine with everything in `versions` loaded. `tokens`: about how many a promise may sample in all."""

    engine: Engine
    versions: Versions
    tokens: int

    async def sample(
        self, prompt: Sequence[int], of: Stored, *, stream: bool = False, start: Start | None = None, **how: Any
    ) -> Tokens:
        """All tokens of one choice."""
        (choice_tokens,) = await self.choices(prompt, of, [start or Start()], stream=stream, **how)
        return choice_tokens

    async def choices(
        self,
        prompt: Sequence[int],
        of: Stored,
        starts: Sequence[Start],
        *,
        stream: bool = False,
        salt: str = "",
        **how: Any,
    ) -> list[Tokens]:
        """All tokens of each choice, in the order of `starts`."""
        sampling = Sampling(**{"max_tokens": 16, **how})
        tokens_of = {start.choice: Tokens(start.choice, sets=[]) for start in starts}
        pieces: dict[int, int] = {}
        async for tokens in self.engine.generate(
            prompt, sampling, of.version, starts, stream=stream, share=Share(salt)
        ):
            tokens_of[tokens.choice].add(tokens)
            pieces[tokens.choice] = pieces.get(tokens.choice, 0) + 1
        if not stream:
            assert set(pieces.values()) == {1}, "without a stream each choice is one piece"
        return [tokens_of[start.choice] for start in starts]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Token ids that are text."""
    return [(7 * index + 11 * salt + 3) % 256 + len(tiny_model.SPECIAL) for index in range(length)]


def recomputed(of: Stored, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> torch.Tensor:
    """Logprobs of `sampled` as a trainer computes them."""
    logprobs: torch.Tensor = (logits_of(of, prompt, sampled) / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor([*sampled])[:, None])[:, 0]


def logits_of(of: Stored, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """Logits at the positions of `sampled`, by one plain eager forward of transformers."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits: torch.Tensor = _model(of.folder, of.base)(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


@cache
def _model(folder: Path, base: Path | None) -> Any:
    return load_model(base or folder, folder if base else None, torch.float32).eval()
