"""Test the end of a program with work in flight, when Python frees memory that the device still
uses.
"""

from __future__ import annotations

import pytest

from aiordma import verbs
from tests.processes import run_python

# `begin` leaves a send, long reads and long writes in flight. The send waits for a receive that is
# never posted. Their memory is allocated by the library, is a registered bytearray, or is
# registered only by its address.
BEGIN = """
import array, asyncio, atexit, builtins, gc, os, sys, threading, types, warnings
last = []  # what runs after the exit handlers of aiordma
atexit.register(lambda: [call() for call in last])
import aiordma
warnings.simplefilter("ignore", ResourceWarning)
from aiordma import AsyncQueuePair, verbs
from aiordma.verbs import AccessFlags, WROpcode

RIGHTS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
SIZE = 8 << 20

bare = []  # memory that the program itself has to keep

class Everything:
    pass

def connect(first, second):
    here, there = first.endpoint(), second.endpoint()
    first.connect(here, there, access=RIGHTS, rnr_retry=7)
    second.connect(there, here, access=RIGHTS, rnr_retry=7)

def begin():
    own = Everything()
    own.context = verbs.open_device(sys.argv[1])
    own.pd = own.context.alloc_pd()
    own.cq = own.context.create_cq(256)
    own.pairs = [(own.pd.create_qp(own.cq), own.pd.create_qp(own.cq)) for _ in range(3)]
    own.lent = bytearray(b"x") * SIZE
    own.library = own.pd.reg_mr(SIZE, RIGHTS)
    own.region = own.pd.reg_mr(own.lent, RIGHTS)
    bare.append(array.array("B", bytes(SIZE)))
    own.pointer = own.pd.reg_pointer(bare[-1].buffer_info()[0], SIZE, RIGHTS)
    for first, second in own.pairs:
        connect(first, second)
    (waits, _), (reads, _), (writes, _) = own.pairs
    here, there, known = own.library.sge(), own.region, own.pointer
    waits.post_send([verbs.SendWorkRequest(1, WROpcode.SEND, [there.sge(0, 8)])])
    reads.post_send([verbs.SendWorkRequest(
        number, WROpcode.RDMA_READ, [here], remote_addr=there.addr, rkey=there.rkey)
        for number in range(8)])
    writes.post_send([verbs.SendWorkRequest(
        number, WROpcode.RDMA_WRITE, [here], remote_addr=known.addr, rkey=known.rkey)
        for number in range(8)])
    return own

async def queue():
    own = begin()
    own.queues = AsyncQueuePair(own.pd), AsyncQueuePair(own.pd)
    connect(*(each.qp for each in own.queues))
    own.sending = asyncio.ensure_future(own.queues[0].send([own.region.sge(0, 64)]))
    own.receiving = own.queues[0].recv_nowait([own.region.sge()])
    await asyncio.sleep(0)
    return own

async def connection():
    own = Everything()
    host = str(verbs.find_device(sys.argv[1]).open().choose_gid().gid.ip)
    own.listener = await aiordma.listen(host, device=sys.argv[1])
    own.ends = await asyncio.gather(
        aiordma.connect(host, own.listener.port, device=sys.argv[1]), own.listener.accept())
    own.messages = [bytes(SIZE) for _ in range(4)]
    for end in own.ends:
        for message in own.messages:
            end.send_nowait(message)
        end.send_nowait(b"short")
    (await own.ends[0].recv()).release()
    return own

def forked(run):
    child = os.fork()
    if child:
        own = begin()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return run()
"""

ENDINGS = {
    "globals": "kept = begin()",
    "globals one by one": "globals().update(vars(begin()))",
    "dropped": "begin()",
    "a cycle": "own = begin(); own.itself = own; own.lent_to = [own]; del own",
    "collected": "own = begin(); own.itself = own; del own; gc.collect()",
    "another module": "sys.modules['other'] = m = types.ModuleType('other'); m.own = begin()",
    "builtins": "builtins.own = begin()",
    "a function's default": "def f(own=begin()): pass",
    "a closed region": "own = begin(); own.region.close(); own.lent = None",
    "sys.exit": "kept = begin(); sys.exit(0)",
    "an error": "kept = begin(); raise ValueError('meant')",
    "an error with locals": "def f():\n    own = begin(); raise ValueError('meant')\nf()",
    "a daemon thread": "there = threading.Event()\ndef f():\n    own = begin(); there.set()\n"
    "    threading.Event().wait()\nthreading.Thread(target=f, daemon=True).start(); there.wait()",
    "a daemon thread that posts": "there = threading.Event()\ndef f():\n"
    "    globals()['own'] = begin(); there.set()\n    while True:\n        own.cq.poll()\n"
    "threading.Thread(target=f, daemon=True).start(); there.wait()",
    "a thread": "threading.Thread(target=lambda: globals().update(own=begin())).start()",
    "work that begins last": "last.append(lambda: globals().update(own=begin()))\n"
    "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(bare))",
    "an exit handler": "atexit.register(lambda: own.context.close()); own = begin()",
    "a fork's child": "kept = forked(begin)",
    "a fork's child after its parent's": "kept = begin(); kept = forked(begin)",
}

LOOP_ENDINGS = {
    "in a loop": "async def main():\n    own = await {what}(); sys.exit(0)\nasyncio.run(main())",
    "after a loop": "kept = asyncio.run({what}())",
    "a loop that is not closed": "loop = asyncio.new_event_loop()\n"
    "kept = loop.run_until_complete({what}())",
    "a loop that is closed": "loop = asyncio.new_event_loop()\n"
    "kept = loop.run_until_complete({what}()); loop.close()",
    "an error in a loop": "async def main():\n    global own\n    own = await {what}()\n"
    "    raise ValueError('meant')\nasyncio.run(main())",
    "a loop of a daemon thread": "there = threading.Event()\nasync def main():\n"
    "    own = await {what}(); there.set(); await asyncio.Event().wait()\n"
    "threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start(); there.wait()",
}
ENDINGS |= {
    f"{name}: {what}": code.replace("{what}", what)
    for name, code in LOOP_ENDINGS.items()
    for what in ("queue", "connection")
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_program_exits_normally_with_work_in_flight(device: verbs.Device, ending: str) -> None:
    """No signal may end the program, in whatever order Python frees its objects."""
    done = run_python("-c", BEGIN + ENDINGS[ending], device.name, AIORDMA_DEVICE=device.name)
    expected = int("meant" in ENDINGS[ending])
    assert done.returncode == expected, done.stderr
    assert ("ValueError: meant" in done.stderr) == bool(expected)
