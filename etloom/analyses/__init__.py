HELPERS = frozenset({"helpers"})
"""Modules of this package that are not plugins."""
