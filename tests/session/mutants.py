"""Hand-written mistakes in the data path, which `tests.mutants` plants besides its own."""

from __future__ import annotations

# For each mistake: its file, the original text and the replacement.
MUTANTS = {
    "a credit is lost with a cancelled message": (
        "_datapath/outbox.pyx",
        "            (<SendFuture> item).close_payload()\n        else:\n"
        "            (<WRChain> item).free_memory()\n        note_wait(self)",
        "            (<SendFuture> item).close_payload()\n            self.credits.data -= "
        "self.credits.data > 0\n        note_wait(self)",
    ),
    "a CREDIT frame for data spends the last control credit": (
        "_datapath/frames.pyx",
        "self.control >= (1 if self.owed_control else 2)",
        "self.control >= 1",
    ),
    "a receiver that was told of a message and gives up stays counted": (
        "_datapath/inbox.pyx",
        "                inbox.woken_receivers -= 1\n",
        "",
    ),
    "an offer is withdrawn twice": (
        "_datapath/outbox.pyx",
        "self.offers.messages.pop(request_id, None)",
        "self.offers.messages.get(request_id)",
    ),
    "memory of the pool is not kept for a send": (
        "_datapath/sends.pyx",
        "            holder.pins += 1\n            self.source = holder\n",
        "",
    ),
    "a block is free while views show it": (
        "_datapath/memory.pyx",
        "        if not self.pins and not self.leases and not self.views and",
        "        if not self.pins and not self.leases and",
    ),
    "messages do not go on when memory comes": (
        "_datapath/outbox.pyx",
        "        continue_sending(self, AWAITS_MEMORY)",
        "        pass",
    ),
    "what is being read for a cancelled receiver is lost": (
        "_datapath/inbox.pyx",
        "                put_back(inbox, self.target)\n",
        "",
    ),
    "the end of a lease is not announced": (
        "_transport/shares.py",
        "    def _on_expired(self) -> None:\n        self._end(notify=True)",
        "    def _on_expired(self) -> None:\n        self._end(notify=False)",
    ),
    "a region ends with the last rail that had a key": (
        "_transport/shares.py",
        "            self._lost_key = key\n",
        "            self._lost_key = key\n            if self.peer_knows_region:\n"
        "                self._end(notify=True)\n",
    ),
    "the peer is not told of the key that takes the place of the last one": (
        "_transport/shares.py",
        "        elif self.peer_knows_region:\n",
        "        elif self.peer_knows_region and self._lost_key is None:\n",
    ),
    "a lease counts from its grant": (
        "_transport/sharing.py",
        "lent=True, lease_start=request.sent_at)",
        "lent=True)",
    ),
    "a chunk that a broken rail has not read counts as read": (
        "_datapath/inbox.pyx",
        "    return fetcher.outbox.stripes.requeue_chunk(lane, pending.striped, start, length)",
        "    lane.chunks_in_flight -= 1\n    return read_done(fetcher, pending, length)",
    ),
    "a message overtakes the writes before it": (
        "_datapath/rail.pyx",
        "        return not self.is_waiting or next(iter(self.works.values()), number + 1) > "
        "number",
        "        return True",
    ),
    "the peer is told of a write that was not done": (
        "_datapath/one_sided.pyx",
        "            self.waiter.has_undone_part = True\n",
        "            pass\n",
    ),
    "a write is over before its message": (
        "_datapath/outbox.pyx",
        "    waiter.parts_remaining += 1\n",
        "",
    ),
    "the next receiver is not told when one that was told gives up": (
        "_datapath/inbox.pyx",
        "            wake_if_ready(inbox)  # the next receiver",
        "            pass  # the next receiver",
    ),
    "what has arrived is not taken before the end": (
        "_transport/lifecycle.py",
        "            self._queue.stop(ConnectionClosedError())\n",
        "            pass\n",
    ),
    "a receiver of memory does not hear of the end": (
        "_transport/lifecycle.py",
        "        self._sharing.end(root)\n        self._messages.end(root)\n",
        "        self._messages.end(root)\n",
    ),
    "RNDV_ACK before the last READ": (
        "_datapath/inbox.pyx",
        "    if pending.unread_bytes:\n        return fetcher.fetch_ahead()",
        "    if pending.unread_bytes and pending.unread_bytes <= 5000 and not pending.target:\n"
        "        fetcher.acknowledge(pending)\n"
        "    if pending.unread_bytes:\n        return fetcher.fetch_ahead()",
    ),
    "the journal forgets a frame early": (
        "_datapath/journal.pyx",
        "    while count:\n",
        "    count = min(count + (count > 0), <uint32_t> queue.size())\n    while count:\n",
    ),
    "Resume says one frame too few": (
        "_datapath/session.pyx",
        "protocol.Resume(number, lead.number, outbox.journal.received)",
        "protocol.Resume(number, lead.number, max(outbox.journal.received, 1) - 1)",
    ),
    "new work goes before what the old lead had": (
        "_datapath/outbox.pyx",
        "        lead.backlog.held = True\n",
        "",
    ),
    "work overtakes a striped write": (
        "_datapath/one_sided.pyx",
        "return TURN_STAY if self.is_write() else TURN_LEAVE",
        "return TURN_LEAVE",
    ),
    "an atomic operation is done again by another rail": (
        "_datapath/one_sided.pyx",
        "        return not was_posted or (\n",
        "        return True or (\n",
    ),
    "a message that is under way goes twice by another rail": (
        "_datapath/outbox.pyx",
        "[frame for frame in missing if frame not in works]",
        "[*missing]",
    ),
    "a lease ends late": (
        "_transport/shares.py",
        "when, self._expire)",
        "when + 0.02, self._expire)",
    ),
    "a rail joins before the lead has done what was before": (
        "_datapath/one_sided.pyx",
        "lead_rail.table.is_in_flight(self.predecessor)\n            or ",
        "",
    ),
}
