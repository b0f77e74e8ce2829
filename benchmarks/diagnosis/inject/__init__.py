"""Injects problems into real traces by re-timing them through their dependency graph.

- bases: the clean runs, real recordings whose own problems are removed through the graph
- draft: a run to which events are added and whose lags are changed, and its re-timed Job
- kinds: one function per kind of problem, in modules by family
- cases: a kind on a base at a strength with a seed: the Job, the true cost and the expected finding
- scores: accuracy, confusion, false alarms and cost error of many cases
"""
