"""Logprobs of transformers' own code with its eager attention, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_inference.errors import VersionUnusable
from headrace_inference.torch_engine.loader import check_whole
from headrace_runtime.storage.versions import fingerprint_tokens
from headrace_schemas.values.blobs import Fingerprint


def fingerprint_of(folder: Path, adapter: Path | None, device: torch.device, dtype: torch.dtype | None) -> Fingerprint:
    """Return the fingerprint of the weights in `folder`, with the adapter applied. The model is released afterwards.

    Raises:
        VersionUnusable: the weights cannot be loaded, or their logprobs are not finite.
    """
    try:
        model = load_model(folder, adapter, dtype).to(device).eval()
        vocabulary = int(AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size)
        tokens = fingerprint_tokens(vocabulary)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(tokens[1:], device=device)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
    except VersionUnusable as error:
        raise VersionUnusable(f"{adapter or folder}: {error}") from error
    except Exception as error:
        raise VersionUnusable(f"{adapter or folder}: {type(error).__name__}: {str(error)[:500]}") from error
    if not bool(torch.isfinite(logprobs).all()):
        raise VersionUnusable(f"{adapter or folder}: its weights give logprobs that are not finite")
    return Fingerprint(token_ids=tokens, logprobs=tuple(logprobs.tolist()))


def load_model(folder: Path, adapter: Path | None, dtype: torch.dtype | None) -> Any:
    """Load the model in `folder`, and apply the adapter if there is one."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_whole(model, info)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter), is_trainable=False)
