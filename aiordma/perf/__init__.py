"""The measurements of `aiordma perf`: latency, bandwidth and rate of each kind of operation.

There are two processes. The client measures, and the server does what the client requests, within
its limits. Requests and results use a separate control connection (`wire`), so that the measured
connections carry nothing else. `settings`, `statistics`, `wire` and `record` perform no I/O.
"""
