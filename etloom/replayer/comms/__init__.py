"""Replay of the recorded communication on real processes."""
