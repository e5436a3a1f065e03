/* Tests of extended reliable connections (IBTA volume 1, annex A14): domains, shared receive queues
 * with their completion queues and protection domains, and errors. */
#define _GNU_SOURCE /* memfd_create */
#include "extended_side.h"

#include "adopted_side.h"

enum {
	NO_NUMBER = 0xffffff, /* reserved, never a queue's number */
};

/* An XRC domain with a shared receive queue, whose receives complete in `side.cq`. `side.qp` is the
 * target queue pair. An end without a domain has an initiator queue pair instead. */
struct end {
	struct side side;
	struct ibv_xrcd *xrcd;
	uint32_t srqn;
};

static struct ibv_xrcd *open_domain(struct ibv_context *context, int fd, int oflags)
{
	struct ibv_xrcd_init_attr attr = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = fd,
		.oflags = oflags,
	};

	return extended(context)->open_xrcd(context, &attr);
}

static int close_domain(struct ibv_xrcd *xrcd)
{
	return extended(xrcd->context)->close_xrcd(xrcd);
}

static struct ibv_srq_init_attr_ex srq_attr(const struct end *end)
{
	return (struct ibv_srq_init_attr_ex){
		.attr = {.max_wr = 64, .max_sge = 4},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = end->side.pd,
		.xrcd = end->xrcd,
		.cq = end->side.cq,
	};
}

static void make_srq(struct end *end)
{
	struct verbs_context *calls = extended(end->side.context);
	struct ibv_srq_init_attr_ex attr = srq_attr(end);

	CHECK(end->side.srq = calls->create_srq_ex(end->side.context, &attr));
	CHECK_OK(calls->get_srq_num(end->side.srq, &end->srqn));
	CHECK(end->srqn > 0 && end->srqn < NO_NUMBER);
}

static struct ibv_qp *make_target(struct ibv_xrcd *xrcd)
{
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = xrcd,
	};

	return extended(xrcd->context)->create_qp_ex(xrcd->context, &attr);
}

static struct ibv_qp *make_source(struct side *side)
{
	struct ibv_qp_init_attr init = {
		.send_cq = side->cq,
		.cap = {.max_send_wr = 64, .max_send_sge = 4},
		.qp_type = IBV_QPT_XRC_SEND,
		.sq_sig_all = 1,
	};

	return verbs->ibv_create_qp(side->pd, &init);
}

/* Open everything except the queue pair. */
static void open_base(struct end *end, struct options options)
{
	memset(end, 0, sizeof(*end));
	open_side(&end->side, options);
	destroy_qp(&end->side);
}

static void open_source(struct end *end, struct options options)
{
	open_base(end, options);
	CHECK(end->side.qp = make_source(&end->side));
}

/* Open a target in the domain of `fd`. If `fd` is -1, the domain is private. */
static void open_target(struct end *end, struct options options, int fd)
{
	open_base(end, options);
	CHECK(end->xrcd = open_domain(end->side.context, fd, O_CREAT));
	make_srq(end);
	CHECK(end->side.qp = make_target(end->xrcd));
}

#define OPEN_SOURCE(end, ...) open_source(end, (struct options){__VA_ARGS__})
#define OPEN_TARGET(end, ...) open_target(end, (struct options){__VA_ARGS__}, -1)
#define OPEN_ENDS(source, target, ...) open_ends(source, target, (struct options){__VA_ARGS__})

static void close_end(struct end *end)
{
	if (end->side.qp)
		destroy_qp(&end->side);
	if (end->side.srq)
		CHECK_OK(verbs->ibv_destroy_srq(end->side.srq));
	end->side.srq = NULL;
	if (end->xrcd)
		CHECK_OK(close_domain(end->xrcd));
	close_side(&end->side);
}

static void open_ends(struct end *source, struct end *target, struct options options)
{
	open_source(source, options);
	open_target(target, options, -1);
	connect_pair(&source->side, &target->side);
}

static void close_ends(struct end *source, struct end *target)
{
	close_end(source);
	close_end(target);
}

static uint64_t *word(const struct side *side, size_t offset)
{
	return (uint64_t *)(void *)(side->memory + offset);
}

/* ---- domains --------------------------------------------------------------------------------- */

static int create_file(void)
{
	int fd = memfd_create("domain", MFD_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

static void domain_is_shared_by_contexts_of_one_device(void)
{
	struct ibv_context *context = open_device(), *second = open_device();
	struct ibv_context *elsewhere = open_device_at(1);
	int one = create_file(), other = create_file(), twin = dup(one);
	struct ibv_xrcd *first, *same, *another;
	const struct {
		int fd, oflags, error;
	} refused[] = {
		{-1, 0, EINVAL},           {-2, O_CREAT, EINVAL},
		{one, 0, EAGAIN}, /* as in the kernel */
		{1 << 20, O_CREAT, EBADF}, {one, O_CREAT | O_APPEND, EINVAL},
	};

	FOR_EACH (i, refused)
		REFUSED(open_domain(context, refused[i].fd, refused[i].oflags), refused[i].error);
	struct ibv_xrcd_init_attr part = {.comp_mask = IBV_XRCD_INIT_ATTR_FD, .fd = one};

	REFUSED(extended(context)->open_xrcd(context, &part), EINVAL);

	/* All contexts of a device in this process share the domain of an inode, whichever
	 * descriptor they use. */
	CHECK(first = open_domain(context, one, O_CREAT | O_EXCL));
	CHECK(first->context == context);
	REFUSED(open_domain(context, twin, O_CREAT | O_EXCL), EINVAL);
	CHECK(same = open_domain(second, twin, 0));
	CHECK(soft_xrcd_of(first)->domain == soft_xrcd_of(same)->domain);
	REFUSED(open_domain(elsewhere, one, 0), EAGAIN);
	CHECK(another = open_domain(elsewhere, one, O_CREAT | O_EXCL));
	CHECK_OK(close_domain(another));
	REFUSED(open_domain(context, other, 0), EAGAIN);
	CHECK_OK(close_domain(first));
	CHECK_OK(close(twin));
	CHECK_OK(close(one)); /* the domain keeps the file open, so its inode is not reused */
	CHECK(first = open_domain(context, other, O_CREAT | O_EXCL));
	CHECK_OK(close_domain(first));
	REFUSED(open_domain(context, other, 0), EAGAIN); /* the last handle ended the domain */
	CHECK_OK(close_domain(same));

	/* A domain without a file is never shared. */
	CHECK(first = open_domain(context, -1, O_CREAT));
	CHECK(same = open_domain(context, -1, O_CREAT | O_EXCL));
	CHECK(soft_xrcd_of(first)->domain != soft_xrcd_of(same)->domain);
	CHECK_OK(close_domain(first));
	CHECK_OK(close_domain(same));
	CHECK_OK(close(other));
	CHECK_OK(verbs->ibv_close_device(context));
	CHECK_OK(verbs->ibv_close_device(second));
	CHECK_OK(verbs->ibv_close_device(elsewhere));
}

/* A forked child has its own device, which has no domains yet. */
static void forked_child_has_no_inherited_domains(void)
{
	struct ibv_context *context = open_device();
	int fd = create_file();
	struct ibv_xrcd *xrcd = open_domain(context, fd, O_CREAT);

	CHECK(xrcd);
	pid_t child = fork_asleep();

	CHECK(child >= 0);
	if (!child) {
#ifndef __SANITIZE_THREAD__ /* TSan cannot start threads in a forked child */
		struct ibv_context *own = open_device();

		REFUSED(open_domain(own, fd, 0), EAGAIN);
		CHECK(xrcd = open_domain(own, fd, O_CREAT | O_EXCL));
		CHECK_OK(close_domain(xrcd));
		CHECK_OK(verbs->ibv_close_device(own));
#endif
		_exit(0);
	}
	expect_exit_success(child);
	CHECK_OK(close_domain(xrcd));
	CHECK_OK(close(fd));
	CHECK_OK(verbs->ibv_close_device(context));
}

/* ---- creation and its reverse ------------------------------------------------------------------ */

static void invalid_xrc_objects_and_requests_are_rejected(void)
{
	struct end a, b, source;
	struct ibv_qp_init_attr init = {.cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_XRC_RECV};
	struct ibv_send_wr send = {.opcode = IBV_WR_SEND}, *bad_send;
	struct ibv_recv_wr receive = {0}, *bad_receive;

	OPEN_TARGET(&a);
	OPEN_TARGET(&b);
	OPEN_SOURCE(&source);
	struct verbs_context *calls = extended(a.side.context);

	const struct ibv_device_attr_ex device = device_of(a.side.context);

	CHECK(device.orig_attr.device_cap_flags & IBV_DEVICE_XRC);
	CHECK_EQUAL(device.xrc_odp_caps, device.odp_caps.per_transport_caps.rc_odp_caps);

	/* Reject a target without a domain or with another context's domain, and a queue pair of
	 * another type with a domain. */
	REFUSED(verbs->ibv_create_qp(a.side.pd, &init), EINVAL);
	struct ibv_qp_init_attr_ex more = {
		.qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = b.xrcd,
	};

	REFUSED(calls->create_qp_ex(a.side.context, &more), EINVAL);
	more.comp_mask = IBV_QP_INIT_ATTR_PD;
	more.pd = a.side.pd;
	REFUSED(calls->create_qp_ex(a.side.context, &more), EINVAL);
	more.qp_type = IBV_QPT_RC;
	more.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD;
	more.xrcd = a.xrcd;
	more.send_cq = more.recv_cq = a.side.cq;
	REFUSED(calls->create_qp_ex(a.side.context, &more), EINVAL);
	/* Reject an initiator without a completion queue, and an RC queue pair with an XRC shared
	 * receive queue. */
	init.qp_type = IBV_QPT_XRC_SEND;
	REFUSED(verbs->ibv_create_qp(a.side.pd, &init), EINVAL);
	init.qp_type = IBV_QPT_RC;
	init.send_cq = init.recv_cq = a.side.cq;
	init.srq = a.side.srq;
	REFUSED(verbs->ibv_create_qp(a.side.pd, &init), EINVAL);
	/* Reject a shared receive queue if one of its objects is missing or belongs to another
	 * context. */
	for (uint32_t bit = IBV_SRQ_INIT_ATTR_PD; bit <= IBV_SRQ_INIT_ATTR_CQ; bit <<= 1) {
		struct ibv_srq_init_attr_ex attr = srq_attr(&a);

		attr.comp_mask &= ~bit;
		REFUSED(calls->create_srq_ex(a.side.context, &attr), EINVAL);
		attr = srq_attr(&a);
		attr.pd = bit == IBV_SRQ_INIT_ATTR_PD ? b.side.pd : a.side.pd;
		attr.xrcd = bit == IBV_SRQ_INIT_ATTR_XRCD ? b.xrcd : a.xrcd;
		attr.cq = bit == IBV_SRQ_INIT_ATTR_CQ ? b.side.cq : a.side.cq;
		REFUSED(calls->create_srq_ex(a.side.context, &attr), EINVAL);
	}

	/* The pointers to objects that a queue pair does not use are NULL. */
	CHECK(!a.side.qp->pd && !a.side.qp->send_cq && !a.side.qp->recv_cq && !a.side.qp->srq);
	CHECK(!source.side.qp->recv_cq && source.side.qp->send_cq == source.side.cq);
	CHECK_OK(to_init(&source.side));
	CHECK_OK(to_init(&a.side));
	CHECK_EQUAL(source.side.context->ops.post_recv(source.side.qp, &receive, &bad_receive),
		    EINVAL);
	CHECK_EQUAL(a.side.context->ops.post_recv(a.side.qp, &receive, &bad_receive), EINVAL);
	enter_state(&a.side, IBV_QPS_RESET);
	enter_state(&source.side, IBV_QPS_RESET);
	connect_pair(&source.side, &a.side);
	CHECK_EQUAL(a.side.context->ops.post_send(a.side.qp, &send, &bad_send), EINVAL);
	CHECK(bad_send == &send);
	CHECK_EQUAL(post(&source.side, (struct request){.opcode = IBV_WR_SEND, .srqn = 1 << 24}),
		    EINVAL);

	/* Objects in use cannot be destroyed (ibv_open_xrcd(3)). */
	CHECK_EQUAL(close_domain(a.xrcd), EBUSY);
	destroy_qp(&a.side);
	CHECK_EQUAL(close_domain(a.xrcd), EBUSY);
	CHECK_EQUAL(verbs->ibv_destroy_cq(a.side.cq), EBUSY);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(a.side.pd), EBUSY);
	close_end(&source);
	close_end(&a);
	close_end(&b);
}

/* ---- traffic --------------------------------------------------------------------------------- */

/* One connection serves shared receive queues of two contexts, with separate protection domains and
 * completion queues. Each message uses the queue that its request names. */
static void message_uses_the_srq_its_request_specifies(void)
{
	struct end source, target, second;
	int fd = create_file();

	OPEN_SOURCE(&source);
	open_target(&target, (struct options){0}, fd);
	open_target(&second, (struct options){0}, fd);
	CHECK(target.srqn != second.srqn);
	connect_pair(&source.side, &target.side);
	struct side *a = &source.side;

	for (unsigned i = 0; i < 20; i++) {
		struct end *to = i % 3 ? &target : &second;

		post_receive_at(&to->side, 100 + i, 0, 64);
		fill(a->memory, 64, i);
		RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = i, .length = 64, .srqn = to->srqn);
		struct ibv_wc wc = next_wc(&to->side);

		CHECK_EQUAL(wc.wr_id, 100 + i);
		CHECK_EQUAL(wc.qp_num, target.side.qp->qp_num); /* the receiving queue pair */
		CHECK(is_filled(to->side.memory, 64, i));
	}
	/* A request can access memory in the protection domain of the named queue (IBTA annex
	 * A14). */
	const struct request write = {.opcode = IBV_WR_RDMA_WRITE,
				      .length = 8,
				      .remote = (uintptr_t)second.side.memory,
				      .rkey = second.side.mr->rkey,
				      .srqn = second.srqn};
	struct request wrong = write;

	run_request(a, IBV_WC_SUCCESS, write);
	wrong.srqn = target.srqn;
	run_request(a, IBV_WC_REM_ACCESS_ERR, wrong);
	expect_event(&target.side, IBV_EVENT_QP_ACCESS_ERR);
	CHECK_OK(close(fd));
	close_end(&source);
	close_end(&second);
	close_end(&target);
}

/* Name the queue with wr_set_xrc_srqn (ibv_wr_post(3)). */
static void builder_selects_the_srq(void)
{
	struct end source, target;
	struct side *a = &source.side;
	uint64_t value = 77;

	open_base(&source, (struct options){0});
	struct ibv_qp_init_attr_ex attr = qp_attr_ex(
		a, (struct extras){.operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_LOCAL_INV |
						 IBV_QP_EX_WITH_ATOMIC_WRITE});

	attr.qp_type = IBV_QPT_XRC_SEND;
	CHECK(a->qp = extended(a->context)->create_qp_ex(a->context, &attr));
	OPEN_TARGET(&target);
	connect_pair(a, &target.side);
	post_receive_at(&target.side, 4, 0, 64);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a->qp);

	qp->wr_start(qp);
	qp->wr_id = 1;
	qp->wr_send(qp);
	qp->wr_set_xrc_srqn(qp, target.srqn);
	qp->wr_set_sge(qp, a->mr->lkey, (uintptr_t)a->memory, 8);
	qp->wr_id = 2;
	qp->wr_atomic_write(qp, target.side.mr->rkey, (uintptr_t)target.side.memory + 64, &value);
	qp->wr_set_xrc_srqn(qp, target.srqn);
	CHECK_OK(qp->wr_complete(qp));
	expect_wc(a, 1, IBV_WC_SUCCESS);
	expect_wc(a, 2, IBV_WC_SUCCESS);
	expect_wc(&target.side, 4, IBV_WC_SUCCESS);
	CHECK_EQUAL(*word(&target.side, 64), 77);
	/* A local request cannot name a queue. */
	qp->wr_start(qp);
	qp->wr_local_inv(qp, 1);
	qp->wr_set_xrc_srqn(qp, target.srqn);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	close_ends(&source, &target);
}

/* ---- what is refused ------------------------------------------------------------------------- */

/* Name a queue that does not exist, is in another domain, or has been destroyed. */
static void unknown_srq_number_is_an_invalid_request(void)
{
	for (int way = 0; way < 3; way++) {
		struct end source, target, stranger;

		OPEN_ENDS(&source, &target);
		OPEN_TARGET(&stranger);
		post_receive_at(&target.side, 1, 0, 64);
		post_receive_at(&stranger.side, 1, 0, 64);
		if (way == 2) {
			CHECK_OK(verbs->ibv_destroy_srq(target.side.srq));
			target.side.srq = NULL;
		}
		RUN(&source.side, IBV_WC_REM_INV_REQ_ERR, IBV_WR_SEND, .wr_id = 3, .length = 8,
		    .srqn = way == 0   ? NO_NUMBER
			    : way == 1 ? stranger.srqn
				       : target.srqn);
		expect_event(&target.side, IBV_EVENT_QP_REQ_ERR);
		wait_for_state(&target.side, IBV_QPS_ERR);
		expect_no_wc(&target.side);
		expect_no_wc(&stranger.side);
		close_end(&stranger);
		close_ends(&source, &target);
	}
}

/* A message is refused if the completion queue has overflowed, because the completion would be
 * lost. */
static void message_is_refused_after_cq_overrun(void)
{
	struct end source, target;
	const struct request send = {.opcode = IBV_WR_SEND, .length = 8};

	OPEN_ENDS(&source, &target, .cqe = 1);
	struct request request = send;

	request.srqn = target.srqn;
	for (int i = 0; i < 2; i++) {
		post_receive_at(&target.side, 1, 0, 64);
		run_request(&source.side, IBV_WC_SUCCESS, request);
	}
	expect_event(&target.side, IBV_EVENT_CQ_ERR);
	run_request(&source.side, IBV_WC_REM_OP_ERR, request);
	close_ends(&source, &target);
}

/* Send a message that is too long for the receive, or send to a receive whose memory has been
 * deregistered. */
static void invalid_receive_fails_on_both_sides(void)
{
	for (int way = 0; way < 2; way++) {
		struct end source, target;

		OPEN_ENDS(&source, &target);
		post_receive_at(&target.side, 6, 0, 64);
		if (way) {
			CHECK_OK(verbs->ibv_dereg_mr(target.side.mr));
			target.side.mr = NULL;
		}
		RUN(&source.side, way ? IBV_WC_REM_OP_ERR : IBV_WC_REM_INV_REQ_ERR, IBV_WR_SEND,
		    .length = way ? 64 : 65, .srqn = target.srqn);
		expect_wc(&target.side, 6, way ? IBV_WC_LOC_PROT_ERR : IBV_WC_LOC_LEN_ERR);
		close_ends(&source, &target);
	}
}

static void xrc_send_connects_only_to_xrc_recv(void)
{
	for (int way = 0; way < 3; way++) {
		struct end a, b;

		OPEN_SOURCE(&a, .timeout = 1, .retry_cnt = 1);
		if (way == 2) {
			CHECK_OK(verbs->ibv_destroy_qp(a.side.qp));
			a.side.qp = create_qp(&a.side);
		}
		if (way == 0)
			OPEN_SOURCE(&b);
		else
			OPEN_TARGET(&b);
		if (way == 1) {
			CHECK_OK(verbs->ibv_destroy_qp(b.side.qp));
			b.side.qp = create_qp(&(struct side){.pd = b.side.pd, .cq = b.side.cq});
		}
		connect_pair(&a.side, &b.side);
		RUN(&a.side, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND);
		close_ends(&a, &b);
	}
}

/* ---- frames of a peer that means harm ------------------------------------------------------------ */

/* A frame that is not valid in XRC, or not in this direction, ends the stream and fails the queue
 * pair. */
static void frames_invalid_for_xrc_fail_the_queue_pair(void)
{
	for (int way = 0; way < 6; way++) {
		struct end end;
		struct soft_frame frame = {.opcode = SOFT_SEND, .psn = PEER_PSN};

		if (way < 3)
			OPEN_TARGET(&end);
		else
			OPEN_SOURCE(&end);
		if (way == 5) {
			CHECK_OK(verbs->ibv_destroy_qp(end.side.qp));
			end.side.qp = create_qp(&end.side); /* RC, whose frames name no queue */
		}
		int fd = adopt(&end.side);

		if (way == 1) /* responses to a target, which sends no requests */
			frame = (struct soft_frame){.opcode = SOFT_ACK};
		if (way == 2)
			frame = (struct soft_frame){.opcode = SOFT_NAK, .psn = end.side.psn};
		if (way >= 4)
			frame.flags = SOFT_FRAME_SRQ;
		send_stream_frame(fd, frame, NULL);
		wait_for_state(&end.side, IBV_QPS_ERR);
		expect_event(&end.side, IBV_EVENT_QP_FATAL);
		close(fd);
		close_end(&end);
	}
}

/* Returns frame `number` of a message that has two PSNs. */
static struct soft_frame frame_of_message(const struct end *end, uint32_t number)
{
	return (struct soft_frame){.opcode = SOFT_SEND,
				   .flags = SOFT_FRAME_SRQ |
					    (number ? SOFT_FRAME_CONTINUES : SOFT_FRAME_MORE),
				   .psn = PEER_PSN + number,
				   .ack = end->srqn,
				   .length = 256};
}

static void wait_until_message_started(struct end *end)
{
	for (;;) {
		soft_lock();
		bool taken = soft_qp_of(end->side.qp)->responder.in_message;

		soft_unlock();
		if (taken)
			return;
		soft_progress();
	}
}

/* Destroy the shared receive queue and its completion queue in the middle of a message. The rest is
 * refused, and nothing more is written or completed. */
static void rest_of_message_is_refused_if_srq_is_destroyed(void)
{
	struct end end;
	struct side *side = &end.side;

	OPEN_TARGET(&end, .mtu = IBV_MTU_256);
	int fd = adopt(side);

	memset(side->memory, 0x5a, 512);
	post_receive_at(side, 1, 0, 512);
	send_stream_frame(fd, frame_of_message(&end, 0), NULL);
	wait_until_message_started(&end);
	CHECK_OK(verbs->ibv_destroy_srq(side->srq));
	side->srq = NULL;
	CHECK_OK(verbs->ibv_destroy_cq(side->cq));
	CHECK(side->cq = verbs->ibv_create_cq(side->context, 4, NULL, side->channel, 0));
	send_stream_frame(fd, frame_of_message(&end, 1), NULL);
	struct soft_frame answer = receive_stream_frame(fd, NULL, 0);

	CHECK_EQUAL(answer.opcode, SOFT_NAK);
	CHECK_EQUAL(answer.syndrome, SOFT_NAK_REMOTE_OPERATION);
	expect_no_wc(side);
	CHECK_EQUAL(side->memory[256], 0x5a);
	close(fd);
	close_end(&end);
}

/* If a queue pair fails in the middle of a message, the receive in use is flushed to the completion
 * queue of the shared receive queue. */
static void failed_qp_flushes_the_receive_in_use(void)
{
	struct end end;

	OPEN_TARGET(&end, .mtu = IBV_MTU_256);
	int fd = adopt(&end.side);

	post_recvs(&end.side, 1, 2, 256);
	send_stream_frame(fd, frame_of_message(&end, 0), NULL);
	wait_until_message_started(&end);
	enter_state(&end.side, IBV_QPS_ERR);
	expect_wc(&end.side, 1, IBV_WC_WR_FLUSH_ERR);
	expect_no_wc(&end.side); /* the other receive stays in the queue */
	close(fd);
	close_end(&end);
}

/* Resetting or destroying a queue pair keeps the completions of shared receives, as on hardware.
 * They belong to the shared queue, whose receives would otherwise be lost. */
static void completions_survive_reset_and_destroy(void)
{
	for (int destroyed = 0; destroyed < 2; destroyed++) {
		struct end source, target;
		struct side *a = &source.side, *b = &target.side;

		OPEN_ENDS(&source, &target);
		for (uint64_t i = 0; i < 2; i++) {
			post_receive_at(b, i, i * 64, 64);
			RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = i, .length = 8,
			    .srqn = target.srqn);
		}
		uint32_t number = b->qp->qp_num;

		if (destroyed) {
			destroy_qp(b);
		} else {
			enter_state(b, IBV_QPS_RESET);
		}
		struct ibv_wc wc[3];

		CHECK_EQUAL(poll_cq(b, 3, wc), 2);
		for (uint64_t i = 0; i < 2; i++) {
			CHECK_EQUAL(wc[i].wr_id, i);
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
			CHECK_EQUAL(wc[i].qp_num, number);
		}
		close_ends(&source, &target);
	}
}

/* The connection manager does not support XRC, which needs a separate connection for each
 * direction. */
static void cm_does_not_support_xrc(void)
{
	struct rdma_event_channel *channel = verbs->rdma_create_event_channel();
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct rdma_cm_id *id;

	CHECK_OK(verbs->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK_OK(verbs->rdma_bind_addr(id, (struct sockaddr *)&address));
	struct ibv_pd *pd = verbs->ibv_alloc_pd(id->verbs);
	struct ibv_qp_init_attr init = {.cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_XRC_SEND};

	CHECK_FAILS(verbs->rdma_create_qp(id, pd, &init), EOPNOTSUPP);
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	CHECK_OK(verbs->rdma_destroy_id(id));
	verbs->rdma_destroy_event_channel(channel);
}

int main(void)
{
	limit_seconds(120);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "2", 1));
	STEP(domain_is_shared_by_contexts_of_one_device());
	STEP(forked_child_has_no_inherited_domains());
	STEP(invalid_xrc_objects_and_requests_are_rejected());
	STEP(message_uses_the_srq_its_request_specifies());
	STEP(builder_selects_the_srq());
	STEP(unknown_srq_number_is_an_invalid_request());
	STEP(message_is_refused_after_cq_overrun());
	STEP(invalid_receive_fails_on_both_sides());
	STEP(xrc_send_connects_only_to_xrc_recv());
	STEP(frames_invalid_for_xrc_fail_the_queue_pair());
	STEP(rest_of_message_is_refused_if_srq_is_destroyed());
	STEP(failed_qp_flushes_the_receive_in_use());
	STEP(completions_survive_reset_and_destroy());
	STEP(cm_does_not_support_xrc());
	return 0;
}
