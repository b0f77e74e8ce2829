"""Communication replay: runs the recorded collectives, sends and receives on real processes."""
