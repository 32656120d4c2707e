"""From a folder of somebody else's to a version that a replica would take, and from an adapter to whole weights.

Nothing is stored that the loading code of a replica refuses.
"""
