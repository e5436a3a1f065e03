"""The pure core: state tables, operation slots, credits, slab arithmetic and codecs.

Nothing below this package touches C, asyncio, a clock, a socket or a thread: it is told what
happened, and answers what follows. So all of it can be driven by a test, step by step, without a
device. It imports the standard library, msgpack and :mod:`aiordma.errors`, and nothing else; a
test walks the imports and holds that.
"""
