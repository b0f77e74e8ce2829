HELPERS = frozenset({"chakra_lint"})
"""Modules of this package that are not plugins."""
