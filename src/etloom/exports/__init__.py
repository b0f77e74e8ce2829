HELPERS = frozenset({"chakra_lint", "store"})
"""Modules of this package that are not plugins."""
