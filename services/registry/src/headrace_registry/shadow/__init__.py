"""The shadow: a candidate answers prompts of real sessions again, unseen by their users, before it gets any traffic.

Pure modules: `overlap`, `calibration` and `estimate` evaluate the answers, `expectations` predicts a canary's sessions,
`recording` describes the users' own sessions. The others carry it out: `sampling` takes prompts from the traffic,
`runner` gets them answered (`rerun` answers one, with `gateway_client` and `tool_program`), `prompts` stores them,
`prompt_reader` reads the metrics, `outcome` ends the shadow. See `docs/shadow.md`.
"""
