"""Communication replay: runs the recorded collectives and messages on real processes."""
