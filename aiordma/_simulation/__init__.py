"""Simulated hosts in one process and in virtual time: `aiordma.testing.simulate`.

Each host has an event loop and an embedded device (softdev/src/sim), which speaks RoCE v2 over
a simulated network. A single scheduler runs one event after another in this thread: a datagram
arrives, a timer of a device expires, or a loop runs an iteration. If several hosts are ready, the
seed determines which one is next and how long it is then busy. It also determines what happens to
datagrams.
"""
