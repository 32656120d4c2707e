"""Folders become versions, versions become folders, and two versions are compared."""
