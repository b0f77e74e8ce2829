"""Computation replay: runs the recorded operators of one rank in one process."""
