HELPERS = frozenset({"answers", "helpers", "run_info"})
"""Modules of this package that are not plugins."""
