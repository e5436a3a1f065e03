# Containers for the work that waits until a rail has free send queue entries, and for the work that
# is left over when a rail breaks.

cimport cython

from .memory cimport Clock
from .work_queue cimport WAIT_NONE, WAIT_SEND_QUEUE

import collections


@cython.final
cdef class Backlog:
    """The queue of work that waits for send queue entries. Each item has a sequence number."""

    def __cinit__(self, Clock clock not None):
        self.works, self.wait = collections.OrderedDict(), Wait.__new__(Wait, clock)

    def __len__(self) -> int:
        return len(self.works)

    cdef int append(self, WorkRequest work) except -1:
        self.latest += 1
        self.works[work] = self.latest
        return 0

    cdef WorkRequest first(self):
        return next(iter(self.works))

    cdef bint remove(self, WorkRequest work) except -1:
        return self.works.pop(work, None) is not None

    cdef list take_all(self):
        works = list(self.works)
        self.works.clear()
        self.update_wait()
        return works

    cdef int take_over(self, Backlog previous) except -1:
        """Insert the work of `previous`, including its numbers, in front of this backlog's work."""
        previous.works.update(self.works)
        self.works, previous.works = previous.works, collections.OrderedDict()
        self.latest = max(self.latest, previous.latest)
        previous.held = False
        previous.update_wait()
        return self.update_wait()

    cdef int update_wait(self) except -1:
        """Update `is_waiting` and the wait statistics after a change."""
        self.is_waiting = self.held or bool(self.works)
        self.wait.set_reason(WAIT_SEND_QUEUE if self.is_waiting else WAIT_NONE)
        return 0

    cdef bint has_posted(self, uint64_t number) except -1:
        """Return whether all work up to `number` has been posted or withdrawn."""
        return not self.is_waiting or next(iter(self.works.values()), number + 1) > number


@cython.final
cdef class Leftovers:
    """Work and receives of a broken rail, for the rail on which the session continues."""

    def __cinit__(self):
        self.posted, self.unposted, self.returned_receives, self.late_receives = [], [], [], []

    cdef int keep(self, WorkRequest work, bint was_posted, bint is_first) except -1:
        """Add work for another rail, behind the posted or the unposted work.

        With IS_FIRST, add it in front of that work.
        """
        work.kept = True
        if was_posted and is_first:
            self.posted.insert(0, work)
        elif was_posted or is_first:  # the first work that was not posted follows all posted work
            self.posted.append(work)
        else:
            self.unposted.append(work)
        return 0

    cdef list take_works(self, list unfinished):
        """Remove and return all work in posting order.

        `unfinished` is work of earlier lead rails that this rail had yet to post again. The
        session posts no new work before that is done, so this work comes before `unposted`.
        """
        works = [*(self.posted or ()), *unfinished, *(self.unposted or ())]
        self.posted = self.unposted = None
        return works

    cdef list take_receives(self):
        blocks = self.returned_receives + self.late_receives
        self.returned_receives, self.late_receives = [], []
        return blocks
