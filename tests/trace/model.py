"""A writer of traces that writes the same lines as the device, and models a queue pair."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

from aiordma._trace.records import (
    Completion,
    DestroyedQP,
    End,
    Header,
    Posted,
    PostedReceive,
    PostedSend,
    QPStateChange,
    Record,
)


def line(record: Record) -> str:
    """Return the line that the device writes for a record. It omits fields with default values."""
    told = {"t": record.t, "type": record.TYPE}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is MISSING or value != each.default:
            told[each.name] = value
    return json.dumps(told) + "\n"


def header(**changes: object) -> Header:
    values: dict[str, object] = {
        "t": 1000, "version": 1, "realtime_ns": 5_000_000_000, "boot_id": "boot", "pid": 7,
        "command": "program", "host": "here", "device": "embedded0",
    }  # fmt: skip
    return Header(**{**values, **changes})  # type: ignore[arg-type]


def text(*records: Record) -> bytes:
    return "".join(map(line, records)).encode()


class Writer:
    """Writes the records of one queue pair. The clock advances by one per record."""

    def __init__(self, qp_num: int = 3) -> None:
        self.qp_num = qp_num
        self.records: list[Record] = []
        self.t = 1000
        self.request = 0

    def add(self, record: Record) -> None:
        self.records.append(record)

    def now(self) -> int:
        self.t += 1
        return self.t

    def number(self) -> int:
        self.request += 1
        return self.request

    def send(self, *, signaled: bool = True, opcode: str = "SEND", length: int = 8) -> PostedSend:
        posted = PostedSend(
            t=self.now(), request=self.number(), wr_id=self.request * 10, length=length, num_sge=1,
            qp_num=self.qp_num, opcode=opcode, send_flags=("SIGNALED",) if signaled else (),
        )  # fmt: skip
        self.add(posted)
        return posted

    def receive(self, length: int = 64) -> PostedReceive:
        posted = PostedReceive(
            t=self.now(), request=self.number(), wr_id=self.request * 10, length=length, num_sge=1,
            qp_num=self.qp_num,
        )  # fmt: skip
        self.add(posted)
        return posted

    def complete(
        self, posted: Posted, status: str = "SUCCESS", *, byte_len: int | None = None,
        qp_num: int | None = None, lost: bool = False,
    ) -> Completion:  # fmt: skip
        receive = not isinstance(posted, PostedSend)
        completion = Completion(
            t=self.now(), request=posted.request, cq=1, qp_num=qp_num or self.qp_num,
            wr_id=posted.wr_id, status=status, opcode="RECV" if receive else "SEND",
            byte_len=byte_len, lost=lost,
        )  # fmt: skip
        self.add(completion)
        return completion

    def state(self, before: str, after: str) -> None:
        self.add(
            QPStateChange(t=self.now(), qp_num=self.qp_num, cur_qp_state=before, qp_state=after)
        )

    def destroy(self) -> None:
        self.add(DestroyedQP(t=self.now(), qp_num=self.qp_num))

    def end(self, error: str | None = None) -> None:
        self.add(End(t=self.now(), error=error))

    def data(self, **changes: object) -> bytes:
        return text(header(**changes), *self.records)
