"""Anti-patterns: each module finds one way in which a rank loses time.

A pattern holds ``find(view)``, which gives a `Finding` for each place where the pattern costs time. The first line of
its docstring says what the pattern is. `etloom analyze findings` runs them all and ranks what they find.
"""

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.job_view import Views
from etloom.analyses.findings.rank_view import View

__all__ = ["Finding", "View", "Views"]
