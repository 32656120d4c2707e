"""All models, including those without a trainer: register, serve, labels, aliases, tags, notes, retire, audit.

Each module is one kind of change. It runs in the transaction of `changes.RegistryChanges`, and raises `Refused` before
it has changed anything.
"""
