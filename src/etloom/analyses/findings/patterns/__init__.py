"""Performance problem patterns: each module detects one way in which a rank loses time.

A pattern defines ``find(view)``, which yields a `Finding` for each place where it costs time. Its
docstring says in the first line what it finds, then the rules, and ends with lines `Cost:` and `Confidence:`: it is a
section of docs/reference/findings.md. `etloom analyze findings` runs all patterns and ranks their findings.

Optional constants: NEEDS_OTHER_RANKS is True for a pattern of scope "rank" that asks the `RankView` for times of other
ranks (waiting_for_ranks, delaying_ranks), so that its findings cannot be kept with the rank. RANK_TABLES lists
functions (view) -> DataFrame, whose results are kept instead.
"""
