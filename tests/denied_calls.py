"""Seccomp filters by which tests make the kernel deny system calls (seccomp(2))."""

from __future__ import annotations

import ctypes
import platform
import socket
import struct
from dataclasses import dataclass

MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call and its numbers on each architecture in `MACHINES`."""

    name: str
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    family: socket.AddressFamily | None = None  # deny only this first argument
    is_needed: bool = True  # the device has no substitute
    links: tuple[str, ...] = ("shared",)


# Calls that the device needs, followed by calls that it can do without.
CALLS = (
    Call("socket(AF_INET)", ((41,), (198,)), socket.AF_INET),
    Call("epoll_ctl", ((233,), (21,))),
    Call("epoll_wait or epoll_pwait", ((232, 281), (22,))),
    Call("poll or ppoll", ((7, 271), (73,))),
    Call("timerfd_settime", ((286,), (86,))),
    Call("fcntl", ((72,), (25,))),
    Call("setsockopt", ((54,), (208,))),
    Call("getsockopt", ((55,), (209,))),
    Call("bind", ((49,), (200,))),
    Call("listen", ((50,), (201,))),
    Call("connect", ((42,), (203,))),
    Call("accept4", ((288,), (242,))),
    Call("getsockname", ((51,), (204,))),
    Call("getpeername", ((52,), (205,))),
    Call("sendto", ((44,), (206,))),
    Call("recvfrom", ((45,), (207,))),
    Call("sendmsg", ((46,), (211,)), links=("shared", "tcp")),
    Call("recvmsg", ((47,), (212,))),
    Call("readv", ((19,), (65,)), links=("tcp",)),
    Call("epoll_create1", ((291,), (20,))),
    Call("eventfd2", ((290,), (19,))),
    Call("timerfd_create", ((283,), (85,))),
    Call("clone or clone3", ((56, 435), (220, 435))),
    Call("sendmmsg", ((307,), (269,)), links=("roce",)),
    Call("recvmmsg", ((299,), (243,)), links=("roce",)),
    Call("ioctl", ((16,), (29,)), links=("roce",)),
    Call(
        "memfd_create", ((319,), (279,)), is_needed=False, links=("shared", "tcp", "roce")
    ),
    Call("getrandom", ((318,), (278,)), is_needed=False),
    Call("pidfd_open", ((434,), (434,)), is_needed=False),
    Call("process_vm_readv", ((310,), (270,)), is_needed=False),
    Call("socket(AF_UNIX)", ((41,), (198,)), socket.AF_UNIX, is_needed=False),
    Call("socket(AF_NETLINK)", ((41,), (198,)), socket.AF_NETLINK, is_needed=False),
    Call("ftruncate", ((77,), (46,)), is_needed=False),
    Call("madvise", ((28,), (233,)), is_needed=False),
    Call("prlimit64", ((302,), (261,)), is_needed=False),
    Call("prctl", ((157,), (167,)), is_needed=False),
    Call("clock_nanosleep", ((230,), (115,)), is_needed=False),
)  # fmt: skip

BY_NAME = {call.name: call for call in CALLS}


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data, little-endian
ALLOW, FAIL = 0x7FFF0000, 0x00050000


def deny(call: Call, error: int) -> None:
    """Make `call` fail with `error` in this process and its future children."""
    code = instruction(LOAD, NUMBER)
    for number in call.numbers[MACHINES.index(platform.machine())]:
        answer = instruction(RETURN, FAIL | error)
        if call.family is not None:
            test = instruction(LOAD, FIRST_ARGUMENT) + instruction(IF_EQUAL, call.family, 0, 1)
            answer = test + answer + instruction(RETURN, ALLOW)
        code += instruction(IF_EQUAL, number, 0, len(answer) // 8) + answer
    code += instruction(RETURN, ALLOW)
    rules = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(rules))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_filter, by_program = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_filter, by_program, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
