"""The shadow: a candidate answers prompts of real sessions again, unseen by their users, before it gets any traffic.

`sampling` selects prompts of the traffic, `runner` has them answered (`rerun` answers one prompt, with `gateway_client`
and `tool_program`), `prompts` stores them, `prompt_reader` reads the metrics, `outcome` ends the shadow with the
estimate of `rollouts.estimate`. See `docs/shadow.md`.
"""
