"""Compatibility layers: the names and options of other tools (HTA, Chakra, PARAM), implemented with etloom."""
