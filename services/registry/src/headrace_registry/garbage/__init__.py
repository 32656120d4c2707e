"""Removes the files of retired versions that nobody needs: not routing, an alias, an adapter, a lineage or a rollout.

Only what a retired version's manifest lists is ever removed, and only where no other version lists it, too. Manifests
stay, so that a version can be explained and compared for ever.
"""
