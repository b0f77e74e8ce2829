HELPERS = frozenset({"chakra_lint", "kineto_lint", "store"})
"""Modules of this package that are not plugins."""
