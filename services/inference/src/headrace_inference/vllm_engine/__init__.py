"""The `vllm` engine: vLLM's engine cores behind Headrace's HTTP interface, prompts and parsers.

`engine` implements the engine in the event loop, `core` declares the interface of an engine core, `library` and `masks`
alone import vLLM, `requests` converts requests and refuses unsupported ones, `probing` checks LoRA folders, compares
logprobs with the fingerprint and keeps incompatible requests in different steps, `orphans` ends vLLM's processes when
the service is killed, `parsers` adapts vLLM's parsers. `settings` announces the engine.
"""
