"""The `vllm` engine: vLLM's own engine cores under our HTTP interface, prompts and parsers.

`engine` is its face to the event loop, `core` what is used of one engine core, `library` the one module that imports
vLLM for it, `requests` what a request becomes and what is refused, `adapters` the check of a LoRA folder, `probing` the
comparison with the fingerprint, `apart` what must not be in one step, `orphans` what vLLM's processes do when ours is
killed, `parsers` vLLM's parsers behind our registries. `settings` announces it.
"""
