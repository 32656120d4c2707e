"""Deletes the files of retired versions that no routing, alias, adapter, lineage or rollout needs.

A file is deleted only if a retired version's manifest lists it and no other version's manifest does. Manifests are
never deleted, so that versions can still be explained and compared.
"""
