"""The shadow: a candidate answers prompts of real sessions again, unseen by their users, before it gets any traffic.

`runner` selects prompts of the traffic and has them answered (`rerun` answers one prompt, with `gateway_client`),
`prompts` stores them, and `prompt_reader` reads the metrics and ends the shadow with the estimate of
`rollouts.estimate`. See `docs/shadow.md`.
"""
