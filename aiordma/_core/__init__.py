"""The pure core: state tables, operation slots, credits, slab arithmetic and codecs.

Nothing in this package uses C, asyncio, a clock, a socket or a thread. Its functions get events and
return the consequences, so a test can drive all of it step by step without a device. The package
imports only the standard library, msgpack and :mod:`aiordma.errors`; a test checks this.
"""
