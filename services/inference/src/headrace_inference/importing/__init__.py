"""Import of model folders as versions, and export of an adapter merged with its base.

The import uses the loading code of a replica, so that it stores no version that a replica would refuse.
"""
