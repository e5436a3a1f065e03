"""The measurements of `aiordma perf`: latency, bandwidth and rate of each kind of operation.

A measurement involves two processes. The client measures, and the server does what the client asks
for, within its limits. Requests and results are exchanged on a separate control connection (see
`wire`), so that the measured connections carry nothing else. The modules `settings`, `statistics`,
`wire` and `record` do not perform any I/O.
"""
