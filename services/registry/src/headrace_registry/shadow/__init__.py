"""The shadow of a rollout: the candidate answers prompts of real sessions again, unseen by their users, before it
serves traffic.

`runner` chooses prompts from the traffic and lets both versions answer them (`rerun` answers one prompt, with
`gateway_client`). `prompts` stores them. `prompt_reader` computes their metrics, and the estimate of
`rollouts.estimate` with which the shadow ends. See `docs/shadow.md`.
"""
