"""Documented errors that no test raises, each with the reason."""

_OF_THE_PEER = "the peer's operation ends with it, not this call: tests/transport/test_sharing.py"
_OF_THE_PEERS_CALLS = "the peer's calls end with it, not this one: tests/transport/test_server.py"
_BOTH_HAVE = "both devices have it"
_OF_THE_BLOCK = "entering or leaving the block raises it, not the call: tests/test_testing.py"

_COMPILED = "no class can stand in for a compiled one: tests/transport/test_message_view.py"

NOT_PROVOKED: dict[tuple[str, str], str] = {
    ("_datapath.message.Message", "BufferStateError"): _COMPILED,
    ("_transport.connection.Connection.__aexit__", "ConnectionBrokenError"): _OF_THE_PEERS_CALLS,
    ("_transport.shares.Share.revoke", "RemoteAccessError"): _OF_THE_PEER,
    ("blocking._Handle.within", "TimeoutError"): "calls of its result raise it, not the call",
    ("cm.lookup.get_devices", "VerbsError"): "there is always the device that the tests run on",
    ("testing.check_leaks", "AssertionError"): _OF_THE_BLOCK,
    ("testing.faults", "AssertionError"): _OF_THE_BLOCK,
    ("testing.faults", "BusyError"): _OF_THE_BLOCK,
    ("testing.faults", "UnsupportedError"): _OF_THE_BLOCK,
    ("testing.faults", "ValueError"): _OF_THE_BLOCK,
    ("transport.Server.close", "ConnectionBrokenError"): _OF_THE_PEERS_CALLS,
    ("transport.Server.close", "ConnectionClosedError"): _OF_THE_PEERS_CALLS,
    ("transport.start_server", "ConnectionBrokenError"): _OF_THE_PEERS_CALLS,
    ("transport.start_server", "ConnectionError"): (
        "the user's handler raises it, and it is logged: tests/transport/test_server.py"
    ),
    ("verbs._device.device.Device.open", "VerbsError"): (
        "the tests of the kernel's device run as root, which may open everything"
    ),
    ("verbs._device.protection_domain.ProtectionDomain.alloc_mw", "UnsupportedError"): _BOTH_HAVE,
    ("verbs._device.protection_domain.ProtectionDomain.create_srq", "UnsupportedError"): _BOTH_HAVE,
    ("verbs._qp.shared_receive_queue.SharedReceiveQueue.modify", "UnsupportedError"): _BOTH_HAVE,
}
