"""Removes the files of retired versions that no routing, alias, adapter, lineage or rollout needs.

Only files that a retired version's manifest lists are removed, and only where no other version lists them. Manifests
stay, so that a version can always be explained and compared.
"""
