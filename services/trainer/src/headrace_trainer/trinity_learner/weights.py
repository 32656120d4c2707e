"""Computes the fingerprint of a model's folder, and checks that its weights are finite. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from headrace_runtime.storage.versions import fingerprint_tokens
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.torch_learner.model.policy import from_folder


@torch.no_grad()
def fingerprint(folder: Path) -> Fingerprint:
    """Compute the fingerprint on the CPU in float32; engines compare it with the weights that they have loaded."""
    model = from_folder(folder, torch.float32, None).eval()
    token_ids = fingerprint_tokens(int(model.get_input_embeddings().num_embeddings))
    logits_TV = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1].float()
    targets_T = torch.tensor(token_ids[1:])
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None]).squeeze(-1)
    return Fingerprint(token_ids=token_ids, logprobs=logprobs_T.tolist())


def is_finite(weights: list[Path]) -> bool:
    """Return whether all weights are finite. Reads them tensor by tensor."""
    for path in weights:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dictionary)
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    return False
    return True
