"""Models in and out of the registry: folders become versions, versions become folders, and two versions are compared."""
