# Encryption of outgoing frames and decryption of incoming frames.

from libc.stdint cimport uint32_t, uint64_t

from .memory cimport BlockCache
from .sends cimport SendFuture

cdef enum:
    TAG = 16                           # bytes that encryption adds to a frame
    PAYLOAD_SEAL = 48                  # bytes after an encrypted rendezvous request: key and tag


cdef class Direction:
    cdef object cipher, keys           # method of the current cipher, and the source of keys
    cdef str method
    cdef bint first_frame_done         # the first frame, which is not encrypted, has passed
    cdef uint64_t frames, bytes        # handled with the current key
    cdef public uint64_t max_frames, max_bytes
    cdef int next_key(self) except -1


cdef class Sealing:
    cdef object suite
    cdef object seal_of_resume, open_of_resume  # ciphers
    cdef readonly Direction sending, receiving
    cdef readonly bint memory_in_clear
    cdef uint32_t seal(self, unsigned char *bytes, uint32_t length) except? 0
    cdef uint32_t open(self, unsigned char *bytes, uint32_t length) except? 0
    cdef bytes seal_resume(self, uint32_t rail, bytes frame)
    cdef bytes open_resume(self, uint32_t rail, bytes frame)
    cdef bytes seal_message(self, SendFuture message, BlockCache pool)
    cdef int open_payload(self, unsigned char *bytes, uint64_t length, bytes seal) except -1
