"""Tests of distributed that depend on internals of its TCP transport, and fail on any other.

The referee fails if one of them passes, so that the table stays accurate.
"""

COMMS = "distributed/comm/tests/test_comms.py"

INTERNALS = {
    f"{COMMS}::test_tls_specific[tornado-None]": "extra_info of TLS: the cipher of a socket",
    f"{COMMS}::test_tls_specific[tornado-localhost]": "the same, with another name in the SNI",
    f"{COMMS}::test_comm_closed_on_write_error[tornado-BufferError]": "replaces comm.stream.write",
    f"{COMMS}::test_comm_closed_on_write_error[tornado-CustomBase]": "replaces comm.stream.write",
    f"{COMMS}::test_share_buffer_with_header[tornado-1-0-False]": (
        "expects a short array to share its memory with the header; here it has its own"
    ),
    f"{COMMS}::test_share_buffer_with_header[tornado-1-1800-False]": "the same",
    f"{COMMS}::test_share_buffer_with_header[tornado-1-2100-True]": (
        "asks the owner of a short array's memory for nbytes; here it is a bytearray, without one"
    ),
    f"{COMMS}::test_share_buffer_with_header[tornado-350000-0-False]": (
        "expects a long one to share its memory with the header if it was sent in parts"
    ),
}

# These tests are not run, because they connect to another machine's address.
OUTSIDE = ["distributed/tests/test_client.py::test_bad_address"]

# These tests may fail, because they depend on timing that no protocol guarantees.
CHANCE = {
    "distributed/tests/test_worker.py::test_upload_file": (
        "expects a worker's folder to be gone, and waits for the client alone, which takes two "
        "seconds to close if it sees before that the scheduler has gone; over TCP it always does"
    )
}
