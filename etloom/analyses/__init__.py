HELPERS = frozenset({"answers", "helpers"})
"""Modules of this package that are not plugins."""
