# Chains of one-sided work requests, which are posted with one doorbell.
#
# A send queue completes in order, so only the last request of a chain is signaled
# (ibv_post_send(3)). An earlier request generates a completion only if it fails, and its wr_id then
# contains BEFORE_LAST. At that point the chain has failed, but its memory is in use until the last
# request has been flushed.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcpy, memmove, memset

cimport cython

from aiordma._core.operations import OperationKind

from .futures cimport DONE, FAILED, PENDING, wrap_callback_error
from .message cimport Counts
from .sends cimport imm_of
from .stripes cimport select_lanes
from .work_queue cimport (
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_SEND_SIGNALED,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    KIND_BATCH,
    KIND_COMPARE_AND_SWAP,
    KIND_READ,
    BEFORE_LAST,
    TURN_LEAVE,
    TURN_STAY,
    TURN_POST,
    WorkQueues,
    post_sends,
)


from aiordma._core import arguments
from aiordma.errors import RDMAError

TRANSFER_SIZE = 8 << 20
cdef uint64_t MAX_TRANSFER = TRANSFER_SIZE


# The device may be using the pinned memory, so the cycle collector must not clear the pins.
@cython.no_gc_clear
cdef class WRChain(WorkRequest):
    """One-sided work requests that are posted together."""

    def __cinit__(self):
        self.request_count, self.pins = 0, []
        self.sends, self.sges, self.capacity = &self.one_send, &self.one_sge, 1

    def __len__(self) -> int:
        return self.request_count

    def __dealloc__(self):
        self.kept = False
        self.free_memory()  # for a chain that was never posted
        if self.sends != &self.one_send:
            PyMem_Free(self.sends)
            PyMem_Free(self.sges)

    cdef aiordma_send *append(
        self, Pinned pinned, uint64_t address, uint32_t length, uint32_t lkey
    ) except NULL:
        """Append a request for pinned local memory. The caller sets its opcode and its target."""
        reserve(self, self.request_count + 1)
        cdef aiordma_send *send = &self.sends[self.request_count]
        cdef ibv_sge *sge = &self.sges[self.request_count]
        memset(send, 0, sizeof(aiordma_send))
        send.num_sge = 1 if length else 0
        sge.addr, sge.length, sge.lkey = address, length, lkey
        self.pins.append(pinned)
        pinned.pins += 1
        self.request_count += 1
        return send

    cdef aiordma_send *add(
        self, uint32_t opcode, Local local, Remote remote, uint32_t right
    ) except? NULL:
        """Add an operation, which is split into pieces if it is long.

        Returns the last piece, or NULL for an empty operation. If the operation is not allowed, an
        exception is raised and nothing is added.
        """
        cdef Local owner = local.whole()
        cdef Remote region = remote.whole()
        cdef aiordma_send *send = NULL
        cdef uint64_t start = 0, length
        if (
            not region._usable
            or region.lease_over()
            or region._user is not self.user
            or not remote._allowed & right
            or (right == IBV_ACCESS_REMOTE_READ and not local.writable)
            or right == IBV_ACCESS_REMOTE_ATOMIC
            or local.length != remote.length
            or owner.gone
            or owner.pinned is None
        ):
            # These calls raise the error. They return only for an atomic that is allowed.
            remote._check_operation(self.user, right, local)
            local.holder()
        while start < local.length or opcode == IBV_WR_RDMA_WRITE_WITH_IMM:
            length = min(local.length - start, MAX_TRANSFER)
            send = self.append(owner.pinned, local.address + start, <uint32_t> length, local.lkey)
            send.opcode = opcode
            send.remote_addr, send.rkey = remote.address + start, region.rkey
            start += length
            if start == local.length:
                break
            if opcode == IBV_WR_RDMA_WRITE_WITH_IMM:  # only the last piece has immediate data
                send.opcode = IBV_WR_RDMA_WRITE
        # Keep the region. If the chain has to wait, the region is checked again before posting.
        if send != NULL and self.region is None:
            self.region = region
        elif send != NULL and self.region is not region:
            if self.regions is None:
                self.regions = []
            self.regions.append(region)
        return send

    cdef uint32_t count_of(self, uint32_t opcode) noexcept:
        cdef uint32_t i, count = 0
        for i in range(self.request_count):
            count += self.sends[i].opcode == opcode
        return count

    cdef bint can_move(self, bint was_posted) noexcept:
        # Unlike an atomic or a write with immediate data, a read or a plain write can be repeated.
        return not was_posted or (
            self.count_of(IBV_WR_RDMA_READ) + self.count_of(IBV_WR_RDMA_WRITE) == self.request_count
        )

    cdef bint move(self, SendQueue new_lead) except -1:
        """Use the keys for `new_lead` instead of those for the broken lead.

        Returns False if a region has no key for the new lead, or if the local memory cannot be
        registered with its device.
        """
        cdef uint32_t i
        cdef list keys = []
        if self.waiter is not None:
            self.waiter.queue = new_lead
        if self.striped is not None:
            return True  # the striped transfer has the keys of all rails
        for i in range(self.request_count):
            keys_by_rail = keys_for(self, self.sends[i].rkey)
            if keys_by_rail is None or new_lead.number not in keys_by_rail:
                return False
            keys.append(keys_by_rail[new_lead.number])
        try:
            set_local_keys(self, new_lead)
        except (RDMAError, OSError, MemoryError):
            return False
        for i in range(self.request_count):
            self.sends[i].rkey = keys[i]
        return True

    cdef int drop_writes(self) except -1:
        """Remove the writes, which have been completed, so that only the reads are repeated."""
        cdef uint32_t i, kept = 0
        cdef list pins = []
        for i in range(self.request_count):
            if self.sends[i].opcode == IBV_WR_RDMA_WRITE:
                self.rail.count_transfers(0, self.sges[i].length)
                (<Pinned> self.pins[i]).unpin_now()
                continue
            self.sends[kept], self.sges[kept] = self.sends[i], self.sges[i]
            pins.append(self.pins[i])
            kept += 1
        self.pins, self.request_count = pins, kept
        return 0

    cdef str text(self, str peer):
        cdef uint64_t length = 0
        cdef uint32_t i
        operation = OperationKind(self.kind).text
        cdef object region = self.region
        if region is None or self.regions is not None:
            return f"{operation} of {self.request_count} requests on memory of {peer}"
        for i in range(self.request_count):
            length += self.sges[i].length
        where = f"region {region.token.region_id:#x} of {peer}"
        if self.kind == KIND_BATCH:
            return f"{operation} of {self.request_count} requests on {where}"
        offset = self.sends[0].remote_addr - <uint64_t> region.token.address
        preposition = "from" if self.kind == KIND_READ else "to"
        return f"{operation} of {length} bytes {preposition} offset {offset} of {where}"

    def atomic(
        self, kind: int, Local old not None, Remote remote not None, compare_add: int, swap: int,
    ):
        """Add an atomic operation that stores the old value in `old`."""
        cdef uint32_t opcode = (
            IBV_WR_ATOMIC_CMP_AND_SWP if kind == KIND_COMPARE_AND_SWAP else IBV_WR_ATOMIC_FETCH_AND_ADD
        )
        send = self.add(opcode, old, remote, IBV_ACCESS_REMOTE_ATOMIC)
        send.compare_add, send.swap = compare_add, swap

    def part(self, uint32_t count) -> WRChain:
        """Move the first `count` requests into a new chain with the same waiter."""
        cdef WRChain part = WRChain.__new__(WRChain)
        part.user, part.kind = self.user, self.kind
        if not 0 < count <= self.request_count:
            raise ValueError(f"cannot take {count} of {self.request_count} requests")
        reserve(part, count)
        part.waiter = self.waiter
        if part.waiter is not None:
            part.waiter.parts_remaining += 1
        part.region, part.regions = self.region, self.regions
        memcpy(part.sends, self.sends, count * sizeof(aiordma_send))
        memcpy(part.sges, self.sges, count * sizeof(ibv_sge))
        part.pins, self.pins = self.pins[:count], self.pins[count:]
        part.request_count = count
        self.request_count -= count
        memmove(self.sends, self.sends + count, self.request_count * sizeof(aiordma_send))
        memmove(self.sges, self.sges + count, self.request_count * sizeof(ibv_sge))
        return part

    cdef int post_to(self, WorkQueues queue, uint64_t wr_id, uint32_t *posted) except -1:
        cdef uint32_t i, last = self.request_count - 1
        cdef uint64_t length = 0
        self.rail = <SendQueue> queue
        for i in range(self.request_count):
            self.sends[i].wr_id = wr_id if i == last else wr_id | BEFORE_LAST
            self.sends[i].send_flags = IBV_SEND_SIGNALED if i == last else 0
            self.sends[i].first_sge = i
            length += self.sges[i].length
        return post_sends(queue, self.sends, last + 1, self.sges, posted, length)

    cdef object reason_not_to_post(self):
        """Return the error if a region has become unusable while the chain waited, or None."""
        # An operation that has started may finish after the program releases its region, because
        # the peer gets the release after the operation. An operation without a waiter has not
        # started. One in the sender's queue could be overtaken by the release.
        cdef bint must_be_usable = self.waiter is None or self.waiter.sender is not None
        cdef Remote region
        for region in (self.region, *(self.regions or ())):
            if region is not None and (region.lease_over() or must_be_usable and not region._usable):
                return region._unusable_error()
        return None

    cdef int take_turn(self) except -1:
        return TURN_POST if self.striped is None else self.striped.take_turn()

    cdef int on_completion(self, uint32_t byte_len) except -1:
        cdef TransferFuture waiter = self.waiter
        cdef uint32_t i
        cdef uint64_t bytes_read = 0, bytes_written = 0
        for i in range(self.request_count):
            if self.sends[i].opcode == IBV_WR_RDMA_READ:
                bytes_read += self.sges[i].length
            elif not is_atomic(self.sends[i].opcode):
                bytes_written += self.sges[i].length
        self.rail.count_transfers(bytes_read, bytes_written)
        self.waiter = None
        self.free_memory()
        return 0 if waiter is None else waiter.on_part_completed(self)

    cdef int on_error(self, object error) except -1:
        cdef TransferFuture waiter = self.waiter
        if self.striped is not None:
            self.striped.stripes.drop(self.striped)
        self.waiter = None  # the traceback of the error may keep this object alive
        return 0 if waiter is None else waiter.settle(FAILED, error)

    cdef int end_unposted(self, object error) except -1:
        if self.waiter is not None:
            self.waiter.has_undone_part = True
        return WorkRequest.end_unposted(self, error)

    cdef int free_memory(self) except -1:
        cdef Pinned pinned
        cdef list pins = self.pins
        if self.kept:  # another rail may post the chain again
            return 0
        self.region = self.regions = self.striped = self.rail = None
        if pins is not None:
            self.pins = None
            for pinned in pins:
                pinned.unpin_now()
        return 0


cdef bint is_atomic(uint32_t opcode) noexcept:
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP or opcode == IBV_WR_ATOMIC_FETCH_AND_ADD


cdef int reserve(WRChain chain, uint32_t capacity) except -1:
    """Grow the chain's arrays so that they can hold `capacity` requests."""
    cdef aiordma_send *sends
    cdef ibv_sge *sges
    if capacity <= chain.capacity:
        return 0
    capacity = max(8, capacity, chain.capacity + chain.capacity // 2)
    sends = <aiordma_send *> PyMem_Malloc(capacity * sizeof(aiordma_send))
    sges = <ibv_sge *> PyMem_Malloc(capacity * sizeof(ibv_sge))
    if sends == NULL or sges == NULL:
        PyMem_Free(sends)
        PyMem_Free(sges)
        raise MemoryError
    memcpy(sends, chain.sends, chain.request_count * sizeof(aiordma_send))
    memcpy(sges, chain.sges, chain.request_count * sizeof(ibv_sge))
    if chain.sends != &chain.one_send:
        PyMem_Free(chain.sends)
        PyMem_Free(chain.sges)
    chain.sends, chain.sges, chain.capacity = sends, sges, capacity
    return 0


cdef int set_local_keys(WRChain chain, SendQueue queue) except -1:
    """Set the lkeys to those for the rail of `queue`, whose device does not own the memory."""
    cdef uint32_t i
    for i in range(chain.request_count):
        chain.sges[i].lkey = queue.keys.local_key(<Pinned> chain.pins[i])
    return 0


cdef dict keys_for(WRChain chain, uint32_t rkey):
    """Return the keys by rail for the region that has `rkey` on the lead rail, or None."""
    cdef Remote region
    for region in (chain.region, *(chain.regions or ())):
        if region is not None and region.rkey == rkey:
            return region._keys
    return None


cdef uint32_t count_long_operation(WRChain chain, uint32_t first, Stripes stripes) except? 0:
    """Return the number of requests that form one long operation, starting at `first`.

    Returns 0 unless other rails can carry a part of the operation.
    """
    cdef aiordma_send *send = &chain.sends[first]
    cdef ibv_sge *sge = &chain.sges[first]
    cdef uint32_t last = first
    cdef uint64_t size = sge.length
    if send.opcode != IBV_WR_RDMA_READ and send.opcode != IBV_WR_RDMA_WRITE:
        return 0
    while (
        chain.sges[last].length == MAX_TRANSFER
        and last + 1 < chain.request_count
        and chain.sends[last + 1].opcode == send.opcode
        and chain.sends[last + 1].rkey == send.rkey
        and chain.sends[last + 1].remote_addr == send.remote_addr + size
        and chain.sges[last + 1].addr == sge.addr + size
        and chain.pins[last + 1] is chain.pins[first]
    ):
        last += 1
        size += chain.sges[last].length
    if len(select_lanes(stripes.lanes, size)) < 2 or not keys_for(chain, send.rkey):
        return 0
    return last + 1 - first


@cython.final
cdef class TransferFuture(OpFuture):
    """The future of a chain, which may be posted in several parts."""

    cdef int on_part_completed(self, WRChain part) except -1:
        cdef uint32_t i
        cdef uint64_t length = 0
        if self.progress is not None:
            for i in range(part.request_count):
                length += part.sges[i].length
            self.add_progress(length)
        return self.on_part_over()

    cdef int on_part_over(self) except -1:
        self.parts_remaining -= 1
        return 0 if self.parts_remaining else self.settle(DONE, None)

    cdef int add_progress(self, uint64_t length) except -1:
        if self.progress is not None and self.state == PENDING:
            self.bytes_done += length
            try:
                self.progress(self.bytes_done)
            except BaseException as error:  # the user's error, raised by the await
                self.settle(FAILED, wrap_callback_error(error))
        return 0

    cdef bint withdraw(self) except -1:
        cdef WRChain chain = self.chain, each
        cdef StripedTransfer striped
        cdef list parts = self.parts or [], waiting = [], started = []
        cdef bint was_waiting
        self.chain = self.parts = None
        if chain is None:
            return False
        for each in (*parts, chain):
            striped = each.striped
            if striped is not None and striped.started:
                started.append(striped)
            else:
                waiting.append(each)
        was_waiting = self.sender is not None and self.sender.withdraw(chain)
        was_waiting |= self.queue.withdraw(waiting)
        for striped in started:  # its chunks in flight continue, but no more are posted
            striped.stripes.drop(striped)
            striped.end_if_over()
        return was_waiting


# ---- several rails ---------------------------------------------------------------------------------

@cython.no_gc_clear
@cython.final
cdef class TransferChunk(WorkRequest):
    """A part of a StripedTransfer on one rail."""

    cdef StripedTransfer transfer
    cdef Pinned pinned
    cdef Lane lane                     # None after completion or failure
    cdef uint64_t start

    cdef int on_completion(self, uint32_t byte_len) except -1:
        cdef Lane lane = self.lane
        if self.transfer.is_write():
            (<SendQueue> lane.rail).count_transfers(0, self.length)
        else:
            (<SendQueue> lane.rail).count_transfers(self.length, 0)
        self.lane = None
        self.free_memory()
        return self.transfer.completed(lane, self.length)

    cdef int on_error(self, object error) except -1:
        cdef SendQueue lead_rail = self.transfer.lead_rail()
        if (
            self.lane is None
            or lead_rail.leftovers is not None
            or (self.lane.rail is not lead_rail and not lead_rail.failed)
        ):
            # The chunk is over, or `free_memory` lets another rail repeat it. Another rail is left
            # if the session is switching to a new lead rail, or if only a secondary rail broke.
            return 0
        return self.transfer.fail(error)

    cdef int free_memory(self) except -1:
        """Unpin the memory. If the chunk has failed, another rail may have to repeat it."""
        cdef Pinned pinned = self.pinned
        cdef Lane lane = self.lane
        self.pinned = self.lane = None
        if lane is not None:
            self.transfer.on_chunk_failure(lane, self.start, self.length)
        if pinned is not None:
            pinned.unpin_now()
        return 0

    cdef str text(self, str peer):
        return self.transfer.chain.text(peer)


# The chain of a write stays in the lead rail's backlog until the write is complete, so that later
# operations wait for it as they would on a single rail. Later work requests wait behind the chain
# in the backlog, and later frames wait until `has_posted` reports that the chain has left the
# backlog. The chain of a read leaves the backlog as soon as the lead rail has room.
#
# The other rails do not start until the lead rail has completed all work that was posted before the
# transfer, including the work that a new lead rail has to repeat.
@cython.no_gc_clear
@cython.final
cdef class StripedTransfer(Striped):
    """A long read or write that uses all rails that are up and have a key for the peer's memory."""

    cdef bint is_write(self) noexcept:
        return self.chain.sends[0].opcode == IBV_WR_RDMA_WRITE

    cdef SendQueue lead_rail(self):
        return <SendQueue> self.stripes.lead_rail

    cdef int take_turn(self) except -1:
        """Start or continue the transfer, which is at the front of the lead rail's backlog.

        A write stays there until it is complete, but a read leaves the backlog when it has started.
        """
        if self.started:
            self.stripes.serve()  # the lead rail has room, or has completed the earlier work
        elif self.chain.reason_not_to_post() is not None:
            return TURN_POST  # the rail checks for the reason again, and ends the chain
        else:
            self.started, self.predecessor = True, self.lead_rail().latest_posted()
            self.stripes.begin(self)
        return TURN_STAY if self.is_write() else TURN_LEAVE

    cdef uint32_t lkey(self, SendQueue rail) except? 0:
        """Return the rail's lkey for the local memory, or 0 if the memory cannot be registered."""
        if rail.number not in self.lkeys:
            try:
                self.lkeys[rail.number] = rail.keys.local_key(self.pinned)
            except (RDMAError, OSError, MemoryError):
                self.lkeys[rail.number] = 0
        return self.lkeys[rail.number]

    cdef uint64_t movable_bytes(self, Lane lane, uint64_t start) except? 0xFFFFFFFFFFFFFFFF:
        cdef SendQueue rail = <SendQueue> lane.rail, lead_rail = self.lead_rail()
        if rail.error is not None or lead_rail.failed:
            return 0
        if lead_rail.backlog.held or not rail.has_room():
            # In the backlog, the chain gets another turn as soon as the lead rail has room.
            if rail is lead_rail:
                lead_rail.post_in_turn(self.chain)
            return 0
        # Wait for the earlier work on the lead rail, which other rails could otherwise overtake.
        if rail is not lead_rail and (
            lead_rail.table.is_in_flight(self.predecessor)
            or lead_rail.table.is_in_flight(self.stripes.last_repeated)
        ):
            return 0
        error = self.chain.reason_not_to_post()
        if error is None and rail.number and not (rail.number in self.keys and self.lkey(rail)):
            if rail is not lead_rail:
                return 0
            error = lead_rail.unknown_outcome(self.chain)
        if error is not None:
            self.fail(error)
            return 0
        return self.size - start

    cdef bint may_exceed_limit(self, Lane lane) except -1:
        # READs that fetch messages count toward the lead rail's limit of CHUNKS_PER_RAIL, even
        # while they wait behind this write in the backlog. The write may exceed the limit.
        # Otherwise, neither the write nor the READs could proceed.
        return lane.rail is self.stripes.lead_rail and not self.chunks_in_flight and self.is_write()

    cdef int post(self, Lane lane, uint64_t start, uint64_t length) except -1:
        cdef SendQueue rail = <SendQueue> lane.rail
        cdef WRChain chain = self.chain
        cdef TransferChunk chunk = TransferChunk.__new__(TransferChunk)
        chunk.kind, chunk.opcode = chain.kind, chain.sends[0].opcode
        chunk.transfer, chunk.lane, chunk.start = self, lane, start
        chunk.length = <uint32_t> length
        chunk.address, chunk.remote_address = (
            chain.sges[0].addr + start, chain.sends[0].remote_addr + start
        )
        if rail.number:
            chunk.lkey, chunk.rkey = self.lkey(rail), self.keys[rail.number]
        else:  # the first lead rail
            chunk.lkey, chunk.rkey = chain.sges[0].lkey, chain.sends[0].rkey
        chunk.pinned = self.pinned
        chunk.pinned.pins += 1
        self.chunks_in_flight += 1
        return rail.post_checked(chunk)

    cdef int completed(self, Lane lane, uint64_t length) except -1:
        self.chunks_in_flight -= 1
        if self.chain.waiter is not None:
            self.chain.waiter.add_progress(length)
        self.stripes.finished(lane, length)
        return self.end_if_over()

    cdef int on_chunk_failure(self, Lane lane, uint64_t start, uint64_t length) except -1:
        """Handle the failure of a chunk after its rail broke and released the memory."""
        self.chunks_in_flight -= 1
        if self.stripes.end_error is not None or (
            self.lead_rail().failed and self.lead_rail().leftovers is None
        ):
            return self.connection_ended()
        # A late packet of a write could overwrite newer bytes at the peer, so another rail repeats
        # the chunk only after the peer has stopped the broken rail. A read can be repeated now.
        if self.is_write():
            return self.stripes.hold(lane, self, start, length)
        if self.dropped:
            return self.end_if_over()
        return self.stripes.requeue_chunk(lane, self, start, length)

    cdef int fail(self, object error) except -1:
        self.stripes.drop(self)
        self.chain.on_error(error)
        return self.end_if_over()

    cdef int connection_ended(self) except -1:
        cdef SendQueue lead_rail = self.lead_rail()
        if self.stripes.end_error is None:
            return self.fail(lead_rail.error_of(self.chain))
        return self.fail(
            lead_rail.owner.error_for(self.stripes.end_error, self.chain.text(lead_rail.peer))
        )

    cdef int end_if_over(self) except -1:
        """Complete the transfer if no chunk is in flight and none remains to be posted."""
        cdef WRChain chain = self.chain
        cdef TransferFuture waiter = chain.waiter
        if self.rest or self.chunks_in_flight or self.held_count or chain.striped is None:
            return 0
        chain.waiter = None
        if waiter is not None:
            waiter.on_part_over()
        # If the chain is still in the backlog, `withdraw` removes it and frees its memory.
        if self.lead_rail().withdraw([chain]):
            return 0
        return chain.free_memory()


cdef WRChain split_part(WRChain chain, uint32_t count):
    cdef WRChain part = chain.part(count)
    if chain.waiter.parts is None:
        chain.waiter.parts = []
    chain.waiter.parts.append(part)
    return part


cdef bint post_long(SendQueue queue, WRChain chain) except -1:
    """Post all operations that several rails can carry, and the requests before them.

    Returns False if `chain` still has requests.
    """
    cdef WRChain part
    cdef StripedTransfer striped
    cdef uint32_t preceding = 0, count
    while preceding < chain.request_count:
        count = count_long_operation(chain, preceding, queue.stripes)
        if not count:
            preceding += 1
            continue
        if preceding:
            queue.post(split_part(chain, preceding))
        part = chain if count == chain.request_count else split_part(chain, count)
        striped = StripedTransfer.__new__(
            StripedTransfer, part.sges[count - 1].addr + part.sges[count - 1].length - part.sges[0].addr
        )
        striped.stripes, striped.chain = queue.stripes, part
        striped.pinned, striped.lkeys = part.pins[0], {}
        striped.keys = keys_for(part, part.sends[0].rkey)
        part.striped = striped
        queue.post_in_turn(part)
        if part is chain:
            return True
        preceding = 0
    return False


cpdef int check_progress(object progress) except -1:
    """Raise TypeError unless `progress` is None or can be called with a number."""
    if progress is not None:
        arguments.callback("progress", progress, "the number of bytes transferred")
    return 0


cdef TransferFuture start_chain(
    SendQueue queue, WRChain chain, Sender sender, object progress
):
    """Post a chain, or queue it until the send queue has room.

    If `sender` is not None, it posts the last request in order with the messages.
    """
    cdef TransferFuture future = TransferFuture.__new__(TransferFuture, queue.table.wakeups)
    check_progress(progress)
    if not chain.request_count:
        future.settle(DONE, None)
        return future
    if queue.number and not queue.failed:  # otherwise, the next lead rail will use its own keys
        set_local_keys(chain, queue)
    future.queue, future.sender, future.progress, future.chain = queue, sender, progress, chain
    future.parts_remaining, chain.waiter = 1, future
    if (
        sender is None
        and queue.stripes is not None
        and len(queue.stripes.lanes) > 1
        and post_long(queue, chain)
    ):
        return future
    # Each part reports progress when it completes. Without progress, all requests before the last
    # one form a single part, which does not have to wait for its turn among the messages.
    while chain.request_count > 1 and (progress is not None or sender is not None):
        queue.post(split_part(chain, 1 if progress is not None else chain.request_count - 1))
    if sender is not None:
        sender.write(chain)
    else:
        queue.post(chain)
    return future


cpdef WRChain new_chain(SendQueue queue, uint32_t kind):
    cdef WRChain chain = WRChain.__new__(WRChain)
    chain.user, chain.kind = queue.owner, kind
    return chain


cdef TransferFuture begin_transfer(
    SendQueue queue, uint32_t kind, Sender sender, Local local, Remote remote, object imm,
    object progress
):
    """Start a read or write. Only a write with immediate data is queued among the messages."""
    cdef WRChain chain = new_chain(queue, kind)
    cdef uint32_t number
    if kind == KIND_READ:
        chain.add(IBV_WR_RDMA_READ, local, remote, IBV_ACCESS_REMOTE_READ)
    elif imm is None:
        chain.add(IBV_WR_RDMA_WRITE, local, remote, IBV_ACCESS_REMOTE_WRITE)
    else:
        number = imm_of(imm)
        chain.add(IBV_WR_RDMA_WRITE_WITH_IMM, local, remote, IBV_ACCESS_REMOTE_WRITE).imm_data = number
        return start_chain(queue, chain, sender, progress)
    return start_chain(queue, chain, None, progress)


def start(SendQueue queue not None, WRChain chain not None) -> TransferFuture:
    """Post the chain of a batch, and return the future of its completion."""
    error = chain.reason_not_to_post()  # a region may have become unusable since it was added
    if error is not None:
        chain.free_memory()  # the traceback of the error may keep the chain alive
        raise error
    return start_chain(queue, chain, None, None)


cdef class Batch:
    """A collection of reads and writes.

    A subclass defines `_register_local` and `_record_target` for memory that is not registered.
    """

    cdef public WRChain _chain  # type: WRChain | None
    cdef uint64_t writes, reads

    def _collect(self, WRChain chain not None):
        self._chain, self.writes, self.reads = chain, 0, 0

    def _count(self, Counts counts not None, uint64_t atomics):
        """Add the operations of the batch to `counts`. The caller passes the number of atomics."""
        counts.writes += self.writes
        counts.reads += self.reads
        counts.atomics += atomics

    def write(self, source: Local | AnyMemory, target: Remote):
        """Add a `Connection.write`. It is complete when the block has ended."""
        if self._chain is None or not isinstance(source, Local) or not isinstance(target, Remote):
            source = self._register_local(source, target, False)
        self._chain.add(
            IBV_WR_RDMA_WRITE, <Local> source, <Remote> target, IBV_ACCESS_REMOTE_WRITE
        )
        self.writes += 1

    def read(self, source: Remote, target: Local | AnyMemory):
        """Add a `Connection.read`. The bytes are in `target` when the block has ended."""
        local = target
        if self._chain is None or not isinstance(target, Local) or not isinstance(source, Remote):
            local = self._register_local(target, source, True)
        self._chain.add(IBV_WR_RDMA_READ, <Local> local, <Remote> source, IBV_ACCESS_REMOTE_READ)
        if local is not target:
            self._record_target()
        self.reads += 1
