"""All models, also those that nobody trains: registering, serving, labels and aliases, tags, notes, retiring, the audit.

Each file is one kind of change. It runs in the transaction of `changes.Changes` and raises `Refused` before it has
changed anything.
"""
