"""Performance problem patterns: each module detects one way in which a rank loses time.

A pattern defines ``find(view)``, which yields a `Finding` for each place where it costs time. The first line of its
docstring describes the pattern. `etloom analyze findings` runs all patterns and ranks their findings.
"""
