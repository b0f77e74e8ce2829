"""Input and output that formats share: compression, the native parser, safe pickle, damaged text."""
