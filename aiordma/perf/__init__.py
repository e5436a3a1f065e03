"""The measurements of `aiordma perf`: latency, bandwidth and rate of each kind of operation.

Two processes: `server` does what it is asked for, within its limits, `client` measures.  What is to
be done travels on a connection of its own (`wire`), so that those that are measured carry nothing
else.  `settings`, `statistics`, `wire` and `record` are pure.
"""
