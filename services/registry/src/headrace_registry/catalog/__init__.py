"""All models, including those without a trainer: register, serve, labels, aliases, tags, notes, retire.

Each function is one kind of change. It runs in the transaction of `pages.http.RegistryChanges`, and raises `Refused`
before it has changed anything.
"""
