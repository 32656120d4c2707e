"""All models, also those that nobody trains: register, serve, labels, aliases, tags, notes, retire, audit.

Each file is one kind of change. It runs in the transaction of `changes.RegistryChanges`, and raises `Refused` before it
has changed anything.
"""
