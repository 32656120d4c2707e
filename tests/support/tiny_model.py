"""A tiny Qwen3 with its own tokenizer, built on the spot in the layout of a real model folder."""

from __future__ import annotations

from pathlib import Path

CHATML = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CORPUS = (
    "the agent reads a question and answers it with a short sentence",
    '{"name": "search", "arguments": {"query": "invoice", "limit": 3}}',
    "system user assistant tool reward trajectory branch version",
    "Who sent the mail about the meeting on Monday at 10:30?",
)


def build(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, vocabulary: int = 320) -> Path:
    """Write config, random float32 weights, tokenizer and template to `folder` and return it. About a second."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder, safe_serialization=True)
    fast.save_pretrained(folder)
    return folder
