"""Replays the recorded communication, the recorded computation, or both with PyTorch, and measures their times."""
