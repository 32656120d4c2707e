"""What the lineage knows of the experiences that it has read: which were trained, which wait, which come too late."""
