"""Folder for `PYTHONPATH` whose `sitecustomize` disturbs a process's access to the files of a blob store."""
