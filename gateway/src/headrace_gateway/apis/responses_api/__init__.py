"""`POST /v1/responses`: OpenAI's Responses API as a translation onto chat calls, which are captured like all others.

`items` reads the conversation, `tools` the tools, `request` the rest of a body, `output` writes a response, `answers`
writes it as a stream, and `conversations` serves the responses that later requests may refer to.
"""
