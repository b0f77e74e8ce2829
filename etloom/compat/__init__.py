"""Thin fronts for people who come from other tools: their names, our verbs."""
