"""Test every transition of every type of queue pair, legal and illegal, on the device itself.

For each type and state, the test tries each next state with exactly the attributes that the table
requires, with each optional attribute and all of them, without each required one, and with each
forbidden one. It also tries each step that is not a transition. The error that
:meth:`QueuePair.modify` raises before the call is compared with the known mistake, and with the
answer of the device without that check.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from aiordma import verbs
from aiordma._core.qp_states import TRANSITIONS, attribute_names
from aiordma.errors import QPTransitionError, VerbsError
from aiordma.verbs import AccessFlags, AddressVector, MigrationState, QPAttrMask, QPState, QPType
from aiordma.verbs._qp.qp_attributes import QPChanges, attr_and_mask
from conftest import kind_of

M = QPAttrMask
NOTHING = QPAttrMask(0)

# The required capabilities whose names differ from those of their types.
CAPABILITY = {QPType.XRC_SEND: "XRC", QPType.XRC_RECV: "XRC"}
TYPES = [
    pytest.param(kind, marks=pytest.mark.needs(CAPABILITY.get(kind, kind.name)), id=kind.name)
    for kind in QPType
]


# The kernel (modify_qp_mask in uverbs_cmd.c) and the embedded device ignore these attributes,
# because programs set the attributes of both sides of an XRC connection on each queue pair.
IGNORED = {
    QPType.XRC_SEND: M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER,
    QPType.XRC_RECV: M.MAX_QP_RD_ATOMIC | M.RETRY_CNT | M.RNR_RETRY,
}


@dataclass(frozen=True)
class Attempt:
    """One modify call, together with the errors deliberately included in it."""

    qp_type: QPType
    current: QPState
    following: QPState
    mask: QPAttrMask
    is_transition: bool = True
    missing: QPAttrMask = NOTHING
    forbidden: QPAttrMask = NOTHING

    @property
    def legal(self) -> bool:
        return self.is_transition and not self.missing and not self.forbidden

    @property
    def carried_out(self) -> bool:
        """Whether the device accepts the call. The device ignores some forbidden attributes."""
        forbidden = self.forbidden & ~IGNORED.get(self.qp_type, NOTHING)
        return self.is_transition and not self.missing and not forbidden

    def __str__(self) -> str:
        step = f"{self.qp_type.name} {self.current.name} -> {self.following.name}"
        return f"{step} with {attribute_names(self.mask)}"


def attempts(qp_type: QPType, current: QPState) -> list[Attempt]:
    """Return all modify calls to try on a queue pair of this type in this state."""
    return list(dict.fromkeys(_attempts(qp_type, current)))


def _attempts(qp_type: QPType, current: QPState) -> Iterator[Attempt]:
    for following in QPState:
        stays = following is current
        row = TRANSITIONS.get((qp_type, current, following))
        if row is None:
            # This transition is illegal. Try it without attributes, with those required by each
            # legal transition to `following`, and with all attributes.
            ways = [way.required for way in TRANSITIONS.values() if way.next is following]
            for mask in {M.STATE, *(way | M.STATE for way in ways), QPAttrMask(sum(M))}:
                yield Attempt(qp_type, current, following, mask, is_transition=False)
            if stays:
                yield Attempt(qp_type, current, following, M.PKEY_INDEX, is_transition=False)
            continue
        # Naming the state is optional if it does not change.
        for base in (row.required | M.STATE, row.required) if stays else (row.required,):

            def attempt(
                mask: QPAttrMask, missing: QPAttrMask = NOTHING, forbidden: QPAttrMask = NOTHING
            ) -> Attempt:
                return Attempt(qp_type, current, following, mask, True, missing, forbidden)  # noqa: B023

            if base:
                yield attempt(base)
            for bit in QPAttrMask:
                if bit in row.required and bit is not M.STATE:
                    yield attempt(base & ~bit, missing=bit)
                elif bit in row.optional:
                    yield attempt(base | bit)
                elif bit not in row.required:
                    yield attempt(base | bit, forbidden=bit)
            yield attempt(base | row.optional)
            yield attempt(
                base | QPAttrMask(sum(M)), forbidden=_outside(row.required | row.optional)
            )


def _outside(mask: QPAttrMask) -> QPAttrMask:
    return QPAttrMask(sum(bit for bit in QPAttrMask if not bit & mask))


# ---- deviations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deviation:
    """A legal modify call that some device rejects with ``errno``, and the reason."""

    reason: str
    errno: int
    concerns: Callable[[Attempt], bool]


DEVIATIONS: dict[str, tuple[Deviation, ...]] = {
    "embedded": (
        Deviation(
            "a stream between two processes has no second path to migrate to",
            errno.EOPNOTSUPP,
            lambda attempt: M.ALT_PATH in attempt.mask,
        ),
    ),
    "rxe": (
        Deviation(
            "the kernel has alternate paths for InfiniBand ports only (_ib_modify_qp)",
            errno.EINVAL,
            lambda attempt: M.ALT_PATH in attempt.mask,
        ),
        Deviation(
            "the kernel adds PORT to an AV in SQD (modify_qp in uverbs_cmd.c), and then finds that"
            " only a reliable queue pair may change it",
            errno.EINVAL,
            lambda attempt: (
                attempt.qp_type is QPType.UC
                and attempt.current is QPState.SQD
                and M.AV in attempt.mask
            ),
        ),
    ),
}


# ---- on the device ------------------------------------------------------------------------------


class Tried:
    """A queue pair that is put into the same state for each attempt."""

    def __init__(self, qp: verbs.QueuePair, current: QPState) -> None:
        self.qp = qp
        self.current = current
        gid = qp.context.choose_gid()
        self.here = here = AddressVector(dgid=gid.gid, sgid_index=gid.gid_index, hop_limit=64)
        self.values: dict[QPAttrMask, QPChanges] = {
            M.CUR_STATE: {"cur_qp_state": current},
            M.EN_SQD_ASYNC_NOTIFY: {"en_sqd_async_notify": False},
            M.ACCESS_FLAGS: {"qp_access_flags": AccessFlags.NONE},
            M.PKEY_INDEX: {"pkey_index": 0},
            M.PORT: {"port_num": 1},
            M.QKEY: {"qkey": 0x11111111},
            M.AV: {"ah_attr": here},
            M.PATH_MTU: {"path_mtu": verbs.MTU.MTU_256},
            M.TIMEOUT: {"timeout": 0.067},
            M.RETRY_CNT: {"retry_cnt": 6},
            M.RNR_RETRY: {"rnr_retry": 6},
            M.RQ_PSN: {"rq_psn": 0},
            M.MAX_QP_RD_ATOMIC: {"max_rd_atomic": 1},
            M.ALT_PATH: {
                "alt_ah_attr": here,
                "alt_pkey_index": 0,
                "alt_port_num": 1,
                "alt_timeout": 0.067,
            },
            M.MIN_RNR_TIMER: {"min_rnr_timer": 0.01},
            M.SQ_PSN: {"sq_psn": 0},
            M.MAX_DEST_RD_ATOMIC: {"max_dest_rd_atomic": 1},
            M.PATH_MIG_STATE: {"path_mig_state": MigrationState.MIGRATED},
            M.CAP: {"cap": qp.capabilities},
            M.DEST_QPN: {"dest_qp_num": qp.qp_num},
            M.RATE_LIMIT: {"rate_limit": 0},
        }
        self.actual = current
        self.restore()

    def changes(self, following: QPState, mask: QPAttrMask) -> QPChanges:
        """Return valid values for all attributes in the mask."""
        changes: QPChanges = {"qp_state": following} if M.STATE in mask else {}
        for bit, values in self.values.items():
            if bit in mask:
                changes.update(values)
        return changes

    def step(self, following: QPState) -> None:
        """Make a legal transition, bypassing the local check. Set only the required attributes."""
        row = TRANSITIONS[self.qp.qp_type, self.qp.state, following]
        assert self.ask(self.changes(following, row.required)) == 0

    def restore(self) -> None:
        """Return to the state through RESET, to undo all effects of the last attempt."""
        self.step(QPState.RESET)
        if self.current is QPState.RESET:
            return
        up = (QPState.INIT, QPState.RTR, QPState.RTS, QPState.SQD)
        way = (
            up[: up.index(self.current) + 1] if self.current in up else (QPState.INIT, self.current)
        )
        for state in way:
            self.step(state)
        self.wait_until_drained()

    def wait_until_drained(self) -> None:
        """Wait until the send queue is drained, as leaving SQD requires (IBTA clause 10.3.1.5)."""
        deadline = time.monotonic() + 30
        while self.qp.query().sq_draining:
            assert time.monotonic() < deadline, "not drained within 30 s"
            os.sched_yield()

    def diagnosis(self, changes: QPChanges) -> tuple[bool, QPAttrMask, QPAttrMask]:
        """Return whether ``modify`` allows the transition, and the missing and forbidden bits."""
        try:
            self.qp.modify(**changes)
        except QPTransitionError as error:
            is_transition = "is not a transition" not in str(error)
            return is_transition, QPAttrMask(error.missing), QPAttrMask(error.forbidden)
        except VerbsError:
            pass  # raised by the device, which is checked separately
        return True, NOTHING, NOTHING

    def ask(self, changes: QPChanges) -> int:
        """Modify without the local check. Return 0 or the errno value of the device."""
        attr, mask = attr_and_mask(changes)
        try:
            self.qp.context.library.calls.ibv_modify_qp(self.qp.pointer, attr, mask)
        except VerbsError as error:
            return error.errno or errno.EIO
        return 0

    def try_one(self, attempt: Attempt, deviations: tuple[Deviation, ...]) -> Deviation | None:
        """Compare one attempt with the local check and the device. Return its deviation, if any."""
        changes = self.changes(attempt.following, attempt.mask)
        expected = attempt.is_transition, attempt.missing, attempt.forbidden
        assert self.diagnosis(changes) == expected, attempt
        if attempt.legal:
            self.restore()
        answer = self.ask(changes)
        there = self.qp.query().qp_state
        before = self.actual
        met = next((d for d in deviations if attempt.legal and d.concerns(attempt)), None)
        if met:
            assert answer == met.errno, f"{attempt}: {errno.errorcode.get(answer)}; {met.reason}"
        elif attempt.carried_out:
            assert answer == 0, f"{attempt}: legal, refused with {errno.errorcode.get(answer)}"
        else:
            assert answer != 0, f"{attempt}: illegal, and the device did it"
        assert there is (before if answer else attempt.following), attempt
        if not answer:
            self.restore()
        return met


@contextlib.contextmanager
def made(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, qp_type: QPType
) -> Iterator[verbs.QueuePair]:
    """Yield a queue pair of any type. XRC_RECV gets a separate XRC domain."""
    if qp_type is QPType.XRC_RECV:
        with pd.context.open_xrcd() as domain, domain.create_qp() as qp:
            yield qp
    else:
        with pd.create_qp(cq, qp_type=qp_type) as qp:
            yield qp


class Failed(Tried):
    """A queue pair put into SQE by a failed send. ``actual`` is its state on the device."""

    def restore(self) -> None:
        self.current, wanted = QPState.RTS, self.current
        super().restore()
        self.current = wanted
        self.fail_a_send()
        self.actual = self.qp.query().qp_state

    def fail_a_send(self) -> None:
        unknown_key = verbs.ScatterGatherElement(4096, 8, 0xDEAD)
        wr = verbs.SendWorkRequest(1, verbs.WROpcode.SEND, [unknown_key], verbs.SendFlags.SIGNALED)
        with contextlib.ExitStack() as stack:
            if self.qp.qp_type is QPType.UD:
                wr.ah = stack.enter_context(self.qp.pd.create_ah(self.here))
                wr.remote_qpn, wr.remote_qkey = self.qp.qp_num, 0x11111111
            self.qp.post_send([wr])
            deadline = time.monotonic() + 30
            while not (completions := self.qp.send_cq.poll()):
                assert time.monotonic() < deadline, "no completion within 30 s"
                os.sched_yield()
        assert not completions[0].ok


class Claimed(Tried):
    """A queue pair in RTS for which each modify call claims another ``cur_qp_state``."""

    def restore(self) -> None:
        self.current, claimed = QPState.RTS, self.current
        super().restore()
        self.current, self.actual = claimed, QPState.RTS


# No modify call leads to SQE, which has a separate test.
@pytest.mark.parametrize(
    "current", [pytest.param(state, id=state.name) for state in QPState if state is not QPState.SQE]
)
@pytest.mark.parametrize("qp_type", TYPES)
def test_device_accepts_all_and_only_legal_transitions(
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    device_name: str,
    qp_type: QPType,
    current: QPState,
) -> None:
    deviations = DEVIATIONS[kind_of(device_name)]
    with made(pd, cq, qp_type) as qp:
        tried = Tried(qp, current)
        met = {tried.try_one(attempt, deviations) for attempt in attempts(qp_type, current)}
    # Every applicable deviation must occur. The test fails once the device has been fixed.
    there = {
        deviation
        for deviation in deviations
        for attempt in attempts(qp_type, current)
        if attempt.legal and deviation.concerns(attempt)
    }
    assert met - {None} == there


@pytest.mark.parametrize(
    "qp_type",
    [
        pytest.param(kind, marks=pytest.mark.needs(kind.name), id=kind.name)
        for kind in (QPType.UC, QPType.UD)
    ],
)
def test_device_accepts_all_and_only_legal_transitions_from_sqe(
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    deviations: frozenset[str],
    qp_type: QPType,
) -> None:
    with pd.create_qp(cq, qp_type=qp_type) as qp:
        tried: Tried = Failed(qp, QPState.SQE)
        every = attempts(qp_type, QPState.SQE)
        if "a failed send of an unreliable queue pair is fatal" in deviations:
            # The queue pair never enters SQE, but the kernel trusts the current state that a modify
            # call claims.
            assert tried.actual is QPState.ERR
            tried = Claimed(qp, QPState.SQE)
            every = [attempt for attempt in every if M.CUR_STATE in attempt.mask]
        else:
            assert tried.actual is QPState.SQE
        for attempt in every:
            assert tried.try_one(attempt, ()) is None
