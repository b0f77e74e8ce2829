"""Patterns that find copies: changes of layout or type, and memcpys that nothing hides or that block the host.

(1) copies that only change layout or type (copy kernels, transposes, `contiguous`, `to`; also on the host);
(2) memcpys during which nothing computes or communicates; (3) copies to the device from pageable memory, or
sixteen or more of less than 64 KiB.

Cost: (1) the kernels or operators; (2) that time; (3) the longer of call and copy.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import Finding, sum_findings
from etloom.analyses.findings.patterns.copies import conversions, host_copies, memcpys
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    findings = [finding for kind in (conversions, memcpys, host_copies) for finding in kind.find(view)]
    if findings:
        count = sum(finding.count for finding in findings)
        yield sum_findings(findings, f"{count:,} copies of tensors and buffers, of {len(findings)} kinds")
