"""`POST /v1/messages`: Anthropic's Messages API as a translation onto chat calls, which are captured like all others.

`blocks` reads the conversation, `request` reads the rest of a body, and `answers` writes an answer, plain and as a
stream. The package has no state between calls.
"""
