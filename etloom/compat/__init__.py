"""Thin fronts with the names and options of other tools (HTA, Chakra, PARAM) on top of etloom's verbs."""
