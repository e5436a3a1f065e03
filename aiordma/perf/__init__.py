"""The measurements of `aiordma perf`: latency, bandwidth and rate of each kind of operation.

A measurement involves two processes. The client measures, and the server does what the client
requests, within its limits. Requests and results are exchanged on a separate control connection
(see `wire`), so the measured connections carry no other traffic. The modules `settings`,
`statistics`, `wire` and `record` do not perform any I/O.
"""
