"""Simulated hosts in one process and in virtual time: `aiordma.testing.simulate`.

Each host has an event loop and an embedded device of its own (softdev/src/path/sim), which speaks
RoCE v2 over a simulated network.  One scheduler lets one thing happen after the other, in this
thread: a datagram arrives, a timer of a device is due, a loop makes a turn.  The seed draws which
of the hosts that have something to do is next, for how long it is busy then, and what happens to
datagrams.
"""
