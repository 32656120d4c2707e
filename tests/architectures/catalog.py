"""Causal language models as transformers has them, built tiny from its configuration classes, with random weights.

Windows, chunks and original contexts are shortened as the models are, so that short sequences reach beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 160
CONTEXT = 256

_LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_MIXED = ["sliding_attention", "full_attention"] * 2


def _rope(kind: str, **parameters: Any) -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


@dataclass(frozen=True)
class Architecture:
    """One line of the table. `settings` go over those of a small Llama, where `bare` is not set."""

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **(self.settings if self.bare else {**_LLAMA, **self.settings}))

    def build(self, folder: Path, seed: int = 0) -> Path:
        """Configuration and random float32 weights, wide enough that a wrong mask moves every answer."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)
        return folder


A = Architecture
_CLASSIC = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_LONG = {"long_factor": [4.0, 2.0, 3.0, 5.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
CATALOG = (
    A("Llama", "llama"),
    A("Llama, linear rope", "llama", _rope("linear", factor=4.0)),
    A("Llama, dynamic NTK rope", "llama", _rope("dynamic", factor=4.0)),
    A("Llama, YaRN rope", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    A(
        "Llama, llama3 rope",
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    A("Llama, longrope", "llama", _rope("longrope", **_LONG, factor=4.0, original_max_position_embeddings=64)),
    A(
        "Llama 4",
        "llama4_text",
        {"attention_chunk_size": 32, "intermediate_size_mlp": 48, **_MOE, "num_experts_per_tok": 1},
    ),
    A(
        "Llama 4, temperature by position",
        "llama4_text",
        {
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 48,
            **_MOE,
            "num_experts_per_tok": 1,
            "floor_scale": 48,
            "attn_temperature_tuning": True,
        },
    ),
    A("Mistral, sliding window", "mistral", {"sliding_window": 24}),
    A("Ministral", "ministral", {"sliding_window": 24, "layer_types": _MIXED}),
    A("Ministral 3", "ministral3", {"sliding_window": None}),
    A("Mixtral", "mixtral", {**_MOE}),
    A("Mixtral, sliding window", "mixtral", {**_MOE, "sliding_window": 24}),
    A("Qwen 2", "qwen2"),
    A("Qwen 2, sliding window", "qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    A("Qwen 2 MoE", "qwen2_moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 16}),
    A("Qwen 3", "qwen3"),
    A("Qwen 3 MoE", "qwen3_moe", _QWEN_MOE),
    A(
        "Qwen 3 Next",
        "qwen3_next",
        {
            **_QWEN_MOE,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    A(
        "Qwen 3.5",
        "qwen3_5_text",
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    A("Gemma", "gemma"),
    A("Gemma 2", "gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    A("Gemma 3", "gemma3_text", {"sliding_window": 24, "layer_types": _MIXED}),
    A(
        "Gemma 3n",
        "gemma3n_text",
        {
            "sliding_window": 24,
            "layer_types": _MIXED,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
    ),
    A(
        "Gemma 4",
        "gemma4_text",
        {
            "sliding_window": 24,
            "layer_types": _MIXED,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    ),
    A("VaultGemma", "vaultgemma", {"sliding_window": 24, "attn_logit_softcapping": 5.0}),
    A("Phi", "phi"),
    A("Phi 3", "phi3", {"sliding_window": None}),
    A("Phi 3, sliding window", "phi3", {"sliding_window": 24}),
    A(
        "Phi 3, longrope",
        "phi3",
        {"original_max_position_embeddings": 64, **_rope("longrope", **_LONG, original_max_position_embeddings=64)},
    ),
    A("Phi MoE", "phimoe", _MOE),
    A(
        "Phi MoE, longrope",
        "phimoe",
        {**_MOE, **_rope("longrope", **_LONG, original_max_position_embeddings=64, short_mscale=1.1, long_mscale=1.2)},
    ),
    A("GPT-2", "gpt2", _GPT2, bare=True),
    A(
        "GPT-Neo",
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "window_size": 24,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        bare=True,
    ),
    A("GPT-NeoX", "gpt_neox", {**_CLASSIC, "intermediate_size": 48}, bare=True),
    A("GPT-J", "gptj", {**_GPT2, "rotary_dim": 4}, bare=True),
    A("GPT-BigCode", "gpt_bigcode", _GPT2, bare=True),
    A("CodeGen", "codegen", {**_GPT2, "rotary_dim": 4}, bare=True),
    A("StarCoder 2", "starcoder2", {"sliding_window": 24}),
    A("OPT", "opt", {**_CLASSIC, "ffn_dim": 48, "word_embed_proj_dim": 32}, bare=True),
    A("BLOOM", "bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}, bare=True),
    A("Falcon", "falcon", {**_CLASSIC, "alibi": False}, bare=True),
    A("Falcon, ALiBi", "falcon", {**_CLASSIC, "alibi": True, "new_decoder_architecture": False}, bare=True),
    A(
        "MPT",
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": CONTEXT},
        bare=True,
    ),
    A("OLMo", "olmo"),
    A("OLMo 2", "olmo2"),
    A("OLMo 3", "olmo3", {"sliding_window": 24, "layer_types": _MIXED}),
    A("OLMoE", "olmoe", {**_QWEN_MOE}),
    A("Cohere", "cohere", {"logit_scale": 1.0}),
    A("Cohere 2", "cohere2", {"logit_scale": 1.0, "sliding_window": 24, "layer_types": _MIXED}),
    A("Granite", "granite", {"attention_multiplier": 0.5, "residual_multiplier": 0.5}),
    A("Granite MoE", "granitemoe", {**_MOE}),
    A(
        "Granite MoE hybrid",
        "granitemoehybrid",
        {
            **_MOE,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
        },
    ),
    A("StableLM", "stablelm"),
    A("Persimmon", "persimmon"),
    A("DeepSeek V2", "deepseek_v2", {**_DEEPSEEK, "topk_method": "greedy"}),
    A("DeepSeek V3", "deepseek_v3", _DEEPSEEK),
    A("GLM", "glm"),
    A("GLM 4", "glm4"),
    A("GLM 4 MoE", "glm4_moe", {**_DEEPSEEK, "head_dim": 8, "num_key_value_heads": 2}),
    A("SmolLM 3", "smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    A("EXAONE 4", "exaone4", {"sliding_window": 24, "layer_types": _MIXED}),
    A("GPT-OSS", "gpt_oss", {**_MOE, "sliding_window": 24, "layer_types": _MIXED}),
    A("Seed-OSS", "seed_oss"),
    A("HunYuan dense", "hunyuan_v1_dense"),
    A("ERNIE 4.5", "ernie4_5"),
    A("Arcee", "arcee"),
    A("Apertus", "apertus"),
    A("Helium", "helium"),
    A("Nemotron", "nemotron"),
    A("MiniMax", "minimax", {**_MOE, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16}),
    A("LFM 2", "lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    A("BitNet", "bitnet"),
    A(
        "XGLM",
        "xglm",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 3,
            "attention_heads": 4,
            "max_position_embeddings": CONTEXT,
        },
        bare=True,
    ),
    A(
        "Mamba",
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        bare=True,
    ),
    A(
        "Mamba 2",
        "mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
        bare=True,
    ),
    A(
        "Falcon H1",
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
    A(
        "Jamba",
        "jamba",
        {
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
        },
    ),
    A(
        "Bamba",
        "bamba",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [1, 3],
        },
    ),
    A("RecurrentGemma", "recurrent_gemma", {"lru_width": 32, "attention_window_size": 24}),
    A(
        "RWKV",
        "rwkv",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "context_length": CONTEXT,
            "attention_hidden_size": 32,
        },
        bare=True,
    ),
)
