"""Exchange and check messages between two MPI ranks, then measure the bandwidth."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import numpy as np

MPI: Any = import_module("mpi4py.MPI")
COUNT = 50
world = MPI.COMM_WORLD
other = 1 - world.rank
for size in (1, 4096, 1 << 20):
    for turn in range(COUNT):
        sent, received = np.full(size, turn, np.uint8), np.empty(size, np.uint8)
        world.Sendrecv(sent, dest=other, recvbuf=received, source=other)
        assert (received == turn).all()
start = time.perf_counter()
for _ in range(COUNT):
    world.Sendrecv(sent, dest=other, recvbuf=received, source=other)
rate = COUNT * len(sent) / (time.perf_counter() - start) / 2**20
window = MPI.Win.Create(received, comm=world)
window.Lock(other)
window.Put(np.full(4096, 77, np.uint8), other)
window.Unlock(other)
world.Barrier()
assert (received[:4096] == 77).all()
window.Free()
if world.rank == 0:
    print(f"{MPI.Get_library_version().splitlines()[0]}: {rate:.1f} MiB/s")
