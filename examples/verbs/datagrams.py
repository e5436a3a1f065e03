"""Datagrams (UD): a queue pair can send to any other queue pair, and the receiver can reply."""

from contextlib import ExitStack

from aiordma import verbs
from aiordma.verbs import GRH_SIZE, Destination, QPType, SendFlags, SendWorkRequest, WROpcode

ROOM, QKEY = 512, 0x1234  # bytes per receive; key known to both ends


class End:
    """An endpoint: a queue pair with its completion queue and memory."""

    def __init__(self, stack: ExitStack, context: verbs.Context) -> None:
        self.pd = stack.enter_context(context.alloc_pd())
        self.cq = stack.enter_context(context.create_cq(16))
        self.mr = stack.enter_context(self.pd.reg_mr(bytearray(2 * ROOM)))
        self.qp = stack.enter_context(self.pd.create_qp(self.cq, qp_type=QPType.UD))
        self.endpoint = self.qp.endpoint(qkey=QKEY)
        self.qp.start(self.endpoint)  # ibv_modify_qp(3) to INIT (with the Q_Key), RTR, RTS
        self.qp.post_recv_one(1, self.mr.addr + ROOM, ROOM, self.mr.lkey)

    def send(self, text: bytes, to: Destination) -> None:
        self.mr.buf[: len(text)] = text
        request = SendWorkRequest(2, WROpcode.SEND, [self.mr.sge(0, len(text))])
        request.send_flags = SendFlags.SIGNALED
        request.ah, request.remote_qpn, request.remote_qkey = to  # wr.ud of struct ibv_send_wr
        self.qp.post_send([request])  # ibv_post_send(3)
        self.completion(2)

    def received(self) -> tuple[verbs.WorkCompletion, bytes]:
        """Wait for a message, and return its completion and contents.

        The global route header (GRH), which precedes the contents in memory, is not returned.
        """
        wc = self.completion(1)
        return wc, bytes(self.mr.buf[ROOM + GRH_SIZE : ROOM + wc.byte_len])

    def completion(self, wr_id: int) -> verbs.WorkCompletion:
        while not (found := self.cq.poll(1)):  # ibv_poll_cq(3)
            pass
        found[0].raise_for_status()
        assert found[0].wr_id == wr_id
        return found[0]


with ExitStack() as stack:
    context = stack.enter_context(verbs.open_device())
    asks, answers = End(stack, context), End(stack, context)

    # A destination consists of the peer's queue pair number and Q_Key, and an address handle with
    # the route to the peer.
    to = asks.qp.destination(asks.endpoint, answers.endpoint)  # ibv_create_ah(3)
    stack.enter_context(to.ah)
    asks.send(b"are you there?", to)

    wc, question = answers.received()
    print("completion:", wc.byte_len, "bytes; message:", len(question), "bytes,", question)
    header = answers.mr.buf[ROOM : ROOM + GRH_SIZE]
    back = answers.pd.create_ah_from_wc(wc, header)  # ibv_create_ah_from_wc(3)
    stack.enter_context(back)
    answers.send(b"yes", Destination(back, wc.src_qp, QKEY))
    wc, answer = asks.received()
    print("response:", answer, "- from the expected peer:", wc.src_qp == answers.qp.qp_num)
