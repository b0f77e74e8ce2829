"""Replay: run the recorded communication, or the recorded computation, again. A Job in, a plan, a run, a Job out."""
