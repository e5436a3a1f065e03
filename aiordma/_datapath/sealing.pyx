# Encrypts outgoing frames and decrypts incoming frames, in the format of aiordma/_core/frames.py.
#
# A queue pair delivers each frame exactly once and in posting order. Both sides therefore count the
# frames and use the frame number as the nonce. Decryption fails if a frame was modified, replayed,
# dropped or reordered.

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.string cimport memcpy, memset

cimport cython

from .memory cimport PoolBlock
from .sends cimport Piece

import os

from aiordma._core import frames
from aiordma.errors import IntegrityError, RDMAError

cdef extern from "<endian.h>" nogil:
    uint64_t htole64(uint64_t)


cdef enum:
    NONCE = 12
    KEY = 32


cdef bytes nonce_of(uint64_t number):
    cdef char[NONCE] nonce
    number = htole64(number)
    memset(nonce, 0, NONCE)
    memcpy(nonce, &number, sizeof(number))
    return PyBytes_FromStringAndSize(nonce, NONCE)


@cython.final
cdef class Direction:
    """The keys for the frames of one side, and the extent of their use."""

    def __init__(self, method: str):
        self.method = method
        self.max_frames, self.max_bytes = frames.REKEY_FRAMES, frames.REKEY_BYTES

    cdef int next_key(self) except -1:
        """Switch to the next key, with which the frame numbers start again at 0."""
        self.cipher = getattr(self.keys.next_cipher(), self.method)
        self.frames = self.bytes = 0
        return 0


cdef object apply_cipher(
    Direction direction, unsigned char *bytes, uint32_t source_length, uint32_t result_length
):
    """Encrypt or decrypt in place. `source_length` bytes become `result_length` bytes.

    Each key is used only for a limited number of frames and bytes.
    """
    if direction.frames >= direction.max_frames or direction.bytes >= direction.max_bytes:
        direction.next_key()
    direction.cipher(
        nonce_of(direction.frames),
        PyMemoryView_FromMemory(<char *> bytes, source_length, PyBUF_READ),
        None,
        PyMemoryView_FromMemory(<char *> bytes, result_length, PyBUF_WRITE),
    )
    direction.frames += 1
    direction.bytes += max(source_length, result_length)


@cython.final
cdef class Sealing:
    """The encryption of one connection, for frames and long messages.

    The first frame of each side is not encrypted, because it exchanges the keys. `suite` is
    `aiordma._transport.encryption`, so this module does not depend on a cryptography package.
    """

    def __init__(self, suite: Suite, memory_in_clear: bool):
        self.suite, self.memory_in_clear = suite, memory_in_clear
        self.sending, self.receiving = Direction("encrypt_into"), Direction("decrypt_into")

    def start(self, sending: Keys, receiving: Keys):
        """Start the encryption with the keys of both directions."""
        self.sending.keys, self.receiving.keys = sending, receiving
        self.seal_of_resume, self.open_of_resume = sending.resume_cipher(), receiving.resume_cipher()
        self.sending.next_key()
        self.receiving.next_key()

    def encrypt_first_frames(self):
        """Encrypt the first frames too, because the keys were not exchanged in frames."""
        self.sending.first_frame_done = self.receiving.first_frame_done = True

    cdef uint32_t seal(self, unsigned char *bytes, uint32_t length) except? 0:
        """Encrypt a frame in place, with room for TAG more bytes, and return its new length.

        Returns 0 if the frame cannot be sent, because it is not the first and there is no key yet.
        """
        if not self.sending.first_frame_done:
            self.sending.first_frame_done = True
            return length
        if self.sending.cipher is None:
            return 0
        apply_cipher(self.sending, bytes, length, length + TAG)
        return length + TAG

    cdef uint32_t open(self, unsigned char *bytes, uint32_t length) except? 0:
        """Decrypt a frame in place and return its new length. Raises IntegrityError on failure."""
        if not self.receiving.first_frame_done:
            self.receiving.first_frame_done = True
            return length
        if self.receiving.cipher is None or length < TAG:
            raise IntegrityError(NOT_SEALED)
        try:
            apply_cipher(self.receiving, bytes, length, length - TAG)
        except self.suite.InvalidTag:
            raise IntegrityError(CHANGED_FRAME) from None
        return length - TAG

    cdef bytes seal_resume(self, uint32_t rail, bytes frame):
        """Encrypt the Resume of a rail with a separate key, because it is not counted."""
        return self.seal_of_resume.encrypt(nonce_of(rail), frame, None)

    cdef bytes open_resume(self, uint32_t rail, bytes frame):
        """Decrypt the Resume that arrived on a rail. The rail's number is the nonce."""
        try:
            return self.open_of_resume.decrypt(nonce_of(rail), frame, None)
        except (self.suite.InvalidTag, ValueError):
            raise IntegrityError(CHANGED_FRAME) from None

    cdef bytes seal_message(self, SendFuture message, BlockCache pool):
        """Replace the bytes of the message with an encrypted copy. Returns its key and tag.

        The copy is in the pool if the pool has memory to spare. It does not wait for the pool,
        because then the encrypted messages of both sides could prevent each other from being read.
        """
        cdef Piece copy = Piece.__new__(Piece), piece = message.first
        cdef PoolBlock block
        cdef unsigned char *to
        try:
            (<object> pool)._require_spare(message.length)
            block = (<object> pool)._block(message.length)
        except (RDMAError, OSError):
            copy.open(bytearray(message.length))
        else:
            block.pins += 1
            block.end_lease()
            copy.source, copy.bytes, copy.length = block, block.bytes(), message.length
        to = <unsigned char *> copy.bytes
        key = os.urandom(KEY)
        sealer = self.suite.payload_sealer(key)
        while piece is not None:
            if piece.length:
                sealer.update_into(
                    PyMemoryView_FromMemory(<char *> piece.bytes, piece.length, PyBUF_READ),
                    PyMemoryView_FromMemory(<char *> to, piece.length, PyBUF_WRITE),
                )
                to += piece.length
            piece = piece.next
        sealer.finalize()
        message.close_payload()
        message.first = copy
        return key + sealer.tag

    cdef int open_payload(self, unsigned char *bytes, uint64_t length, bytes seal) except -1:
        """Decrypt a message in place. On failure, wipe it, because it may be forged."""
        memory = PyMemoryView_FromMemory(<char *> bytes, length, PyBUF_WRITE)
        opener = self.suite.payload_opener(seal[:KEY], seal[KEY:])
        try:
            opener.update_into(memory, memory)
            opener.finalize()
        except self.suite.InvalidTag:
            memset(bytes, 0, length)
            raise IntegrityError(CHANGED_MESSAGE) from None
        return 0

    # ---- for tests ----

    def sealed(self, frame: bytes) -> bytes:
        cdef bytes data = bytes(frame) + bytes(TAG)
        return data[: self.seal(<unsigned char *> PyBytes_AS_STRING(data), len(data) - TAG)]

    def opened(self, frame: bytes) -> bytes:
        cdef bytes data = bytes(bytearray(frame))
        return data[: self.open(<unsigned char *> PyBytes_AS_STRING(data), len(data))]


NOT_SEALED = "the peer sent an unencrypted frame on an encrypted connection"
CHANGED_FRAME: str = (
    "cannot decrypt a frame: this frame or an earlier frame was modified, repeated or dropped on "
    "the way"
)
CHANGED_MESSAGE = "cannot decrypt a long message: the message was modified on the way"
