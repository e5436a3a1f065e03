# Chains of one-sided work requests: posted with one doorbell, completed by the last.
#
# A send queue works in order, so only the last request of a chain is signaled (ibv_post_send(3)).  An
# earlier one that fails completes nevertheless, with BEFORE_LAST in its wr_id.  That is the chain's
# failure but not its end: the last request is flushed behind it.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcpy, memmove, memset

cimport cython

from aiordma._core.operations import OperationKind

from .channel cimport Counts
from .futures cimport OpFuture, complete_waiter
from .memory cimport Local, Pinned, Remote
from .work_queue cimport (
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_SEND_SIGNALED,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    KIND_BATCH,
    KIND_READ,
    KIND_WRITE,
    BEFORE_LAST,
    post_sends,
)


TRANSFER_SIZE = 8 << 20
cdef uint64_t MAX_TRANSFER = TRANSFER_SIZE


# Its pins are the device's: the cycle collector must not clear them.
@cython.no_gc_clear
cdef class WRChain(WorkRequest):
    """One-sided work requests that are posted together."""

    def __cinit__(self):
        self.entries = 0
        self.sends, self.sges, self.room = &self.one_send, &self.one_sge, 1

    def __init__(self, user, kind, waiter=None):
        self.user, self.kind, self.waiter = user, kind, waiter

    def __len__(self):
        return self.entries

    def __dealloc__(self):
        self.free_memory()  # of one that was never posted
        if self.sends != &self.one_send:
            PyMem_Free(self.sends)
            PyMem_Free(self.sges)

    cdef int reserve(self, uint32_t room) except -1:
        cdef aiordma_send *sends
        cdef ibv_sge *sges
        if room <= self.room:
            return 0
        room = max(8, room, self.room + self.room // 2)
        sends = <aiordma_send *> PyMem_Malloc(room * sizeof(aiordma_send))
        sges = <ibv_sge *> PyMem_Malloc(room * sizeof(ibv_sge))
        if sends == NULL or sges == NULL:
            PyMem_Free(sends)
            PyMem_Free(sges)
            raise MemoryError
        memcpy(sends, self.sends, self.entries * sizeof(aiordma_send))
        memcpy(sges, self.sges, self.entries * sizeof(ibv_sge))
        if self.sends != &self.one_send:
            PyMem_Free(self.sends)
            PyMem_Free(self.sges)
        self.sends, self.sges, self.room = sends, sges, room
        return 0

    cdef aiordma_send *append(
        self, Pinned pinned, uint64_t address, uint32_t length, uint32_t lkey
    ) except NULL:
        self.reserve(self.entries + 1)
        cdef aiordma_send *send = &self.sends[self.entries]
        cdef ibv_sge *sge = &self.sges[self.entries]
        memset(send, 0, sizeof(aiordma_send))
        send.num_sge = 1 if length else 0
        sge.addr, sge.length, sge.lkey = address, length, lkey
        if self.pins is None:
            self.pins = []
        self.pins.append(pinned)
        pinned.pins += 1
        self.entries += 1
        return send

    cdef int aim_at(self, Remote region) except -1:
        """Keeps the region: a chain that had to wait asks it once more before it is posted."""
        if self.region is None:
            self.region = region
        elif self.region is not region:
            if self.regions is None:
                self.regions = []
            self.regions.append(region)
        return 0

    cdef bint add_transfer(self, object local_memory, object remote_memory, uint32_t opcode) except -1:
        """Adds a read or write; False: it is not allowed, or has to be cut into pieces, and the
        caller finds out which."""
        cdef Local local
        cdef Remote remote
        cdef uint32_t right = (
            IBV_ACCESS_REMOTE_WRITE if opcode == IBV_WR_RDMA_WRITE else IBV_ACCESS_REMOTE_READ
        )
        if not isinstance(local_memory, Local) or not isinstance(remote_memory, Remote):
            return False
        local, remote = <Local> local_memory, <Remote> remote_memory
        owner, region = local.whole(), remote.whole()
        if (
            owner.gone
            or owner.pinned is None
            or not region._usable
            or (region._deadline != 0 and region.lease_over())
            or region._user is None
            or region._user is not self.user
            or not remote._allowed & right
            or (opcode == IBV_WR_RDMA_READ and not owner.writable)
            or local.length != remote.length
            or not 0 < local.length <= MAX_TRANSFER
        ):
            return False
        send = self.append(owner.pinned, local.address, <uint32_t> local.length, local.lkey)
        send.opcode, send.remote_addr, send.rkey = opcode, remote.address, remote.rkey
        if self.region is not region:
            self.aim_at(region)
        return True

    cdef str text(self, str peer):
        cdef uint64_t length = 0
        cdef uint32_t i
        operation = OperationKind(self.kind).text
        cdef object region = self.region
        if region is None or self.regions is not None:
            return f"{operation} of {self.entries} requests on memory of {peer}"
        for i in range(self.entries):
            length += self.sges[i].length
        where = f"region {region.token.region_id:#x} of {peer}"
        if self.kind == KIND_BATCH:
            return f"{operation} of {self.entries} requests on {where}"
        offset = self.sends[0].remote_addr - <uint64_t> region.token.address
        preposition = "from" if self.kind == KIND_READ else "to"
        return f"{operation} of {length} bytes {preposition} offset {offset} of {where}"

    def write(self, local_memory, remote_memory):
        return self.add_transfer(local_memory, remote_memory, IBV_WR_RDMA_WRITE)

    def read(self, local_memory, remote_memory):
        return self.add_transfer(local_memory, remote_memory, IBV_WR_RDMA_READ)

    def put(
        self, opcode, Pinned pinned not None, address, length, lkey, Remote remote not None,
        remote_address, imm, compare_add=0, swap=0,
    ):
        """Adds a request that has been checked."""
        self.aim_at(remote.whole())
        send = self.append(pinned, address, length, lkey)
        send.opcode, send.remote_addr, send.rkey = opcode, remote_address, remote.rkey
        send.imm_data, send.compare_add, send.swap = imm, compare_add, swap

    def part(self, uint32_t count):
        """Moves the first requests into a chain of their own, which tells the waiter only of a
        failure."""
        cdef WRChain part = WRChain(self.user, self.kind, self.waiter)
        if not 0 < count <= self.entries:
            raise ValueError(f"{count} requests of {self.entries}")
        part.reserve(count)
        part.partial = True
        part.region, part.regions = self.region, self.regions
        memcpy(part.sends, self.sends, count * sizeof(aiordma_send))
        memcpy(part.sges, self.sges, count * sizeof(ibv_sge))
        part.pins, self.pins = self.pins[:count], self.pins[count:]
        part.entries = count
        self.entries -= count
        memmove(self.sends, self.sends + count, self.entries * sizeof(aiordma_send))
        memmove(self.sges, self.sges + count, self.entries * sizeof(ibv_sge))
        return part

    @property
    def lengths(self):
        return [self.sges[i].length for i in range(self.entries)]

    cdef int post_to(self, SendQueue queue, uint64_t wr_id, uint32_t *posted) except -1:
        cdef uint32_t i, last = self.entries - 1
        cdef int code
        for i in range(self.entries):
            self.sends[i].wr_id = wr_id if i == last else wr_id | BEFORE_LAST
            self.sends[i].send_flags = IBV_SEND_SIGNALED if i == last else 0
            self.sends[i].first_sge = i
        with nogil:
            code = post_sends(queue, self.sends, last + 1, self.sges, posted)
        return code

    cdef object refusal(self):
        cdef Remote region = self.region
        if region is not None and region.lease_over():
            return region._unusable()
        if self.regions is not None:
            for region in self.regions:
                if region.lease_over():
                    return region._unusable()
        return None

    cdef int on_completion(self, uint32_t byte_len) except -1:
        self.free_memory()
        return 0 if self.partial or self.waiter is None else complete_waiter(self.waiter, None)

    cdef int on_error(self, object error) except -1:
        waiter, self.waiter = self.waiter, None  # whose error has frames that may have this
        return 0 if waiter is None else complete_waiter(waiter, error)

    cdef int on_withdrawn(self) except -1:
        if self.waiter is not None:
            self.waiter.cancel()
        return 0

    cdef int free_memory(self) except -1:
        cdef Pinned pinned
        cdef list pins = self.pins
        self.region = self.regions = None
        if pins is not None:
            self.pins = None
            for pinned in pins:
                pinned.unpin_now()
        return 0

    def failed(self, error):
        self.on_error(error)

    def release(self):
        self.free_memory()


cdef object transfer(SendQueue queue, object local_memory, object remote_memory, uint32_t opcode):
    cdef WRChain chain
    cdef OpFuture future
    if not queue.accepting or queue.backlogged or queue.failed or not queue.has_room():
        return None
    chain = WRChain.__new__(WRChain)
    chain.user = queue.user
    chain.kind = KIND_WRITE if opcode == IBV_WR_RDMA_WRITE else KIND_READ
    if not chain.add_transfer(local_memory, remote_memory, opcode):
        return None
    future = OpFuture.__new__(OpFuture, queue.table)
    chain.waiter = future
    queue.post_now(chain)
    return future


def write(SendQueue queue not None, local_memory, remote_memory):
    """A future; None: it is not allowed, or has to wait or to be cut into pieces."""
    return transfer(queue, local_memory, remote_memory, IBV_WR_RDMA_WRITE)


def read(SendQueue queue not None, local_memory, remote_memory):
    """As `write`, from `remote_memory` into memory `local_memory`."""
    return transfer(queue, local_memory, remote_memory, IBV_WR_RDMA_READ)


cdef class Batch:
    """Reads and writes that are collected; the subclass does what `add_transfer` does not."""

    cdef public WRChain _transfer
    cdef uint64_t writes, reads

    def _collect(self, WRChain transfer not None):
        self._transfer, self.writes, self.reads = transfer, 0, 0

    def _count(self, Counts counts not None, uint64_t atomics):
        """Adds the operations of the batch to `counts`; the subclass counts the `atomics`."""
        counts.writes += self.writes
        counts.reads += self.reads
        counts.atomics += atomics

    def write(self, source, target):
        """As `Connection.write`, done when the scope has ended."""
        if self._transfer is None or not self._transfer.add_transfer(
            source, target, IBV_WR_RDMA_WRITE
        ):
            self._write(source, target)
        self.writes += 1

    def read(self, source, target):
        """As `Connection.read`; the bytes are there when the scope has ended."""
        if self._transfer is None or not self._transfer.add_transfer(
            target, source, IBV_WR_RDMA_READ
        ):
            self._read(source, target)
        self.reads += 1
