"""Replay of the recorded operators."""
