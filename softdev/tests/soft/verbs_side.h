/*
 * Helpers for tests of the verbs. A side is one end of a connection: a queue pair and all objects
 * that it needs, created through the table of calls and connected without the connection manager.
 */
#pragma once

#include "embedded.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cm_check.h"

static const struct aiordma_calls *verbs;

enum {
	ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
	IBV_ACCESS_REMOTE_ATOMIC
};

/* Zero selects the default of an option that has one. */
struct options {
	size_t memory;       /* bytes; default: 64 KiB */
	uint32_t sends;      /* default: 64 */
	uint32_t receives;   /* default: 64 */
	uint32_t sges;       /* default: 4 */
	int cqe;             /* default: 256 */
	unsigned rights;     /* access rights of the queue pair; default: all */
	uint8_t timeout;     /* default: 20, about 34 s with 7 retries; 255 means 0 */
	uint8_t retry_cnt;   /* default: 7; 8 means 0 */
	uint8_t rnr_retry;   /* default: 7; 8 means 0 */
	uint8_t rnr_timer;   /* default: 1 (10 us); 255 means 0 */
	uint8_t depth;       /* RDMA READs in flight each way; default: 4; 255 means 0 */
	uint8_t answers;     /* max_dest_rd_atomic; default: same as depth */
	enum ibv_mtu mtu;    /* default: 4096 */
	uint8_t traffic_class;
	bool signal_none;    /* sq_sig_all = 0 */
	bool uc;             /* a UC queue pair */
	bool ud;             /* a UD queue pair (ud_side.h) */
	bool ends_with_peer; /* whether to call end_with_peer() (abi/device_calls.h) */
	int comp_vector;     /* completion vector of the completion queue */
	uint8_t gid;         /* GID index; default: 127.0.0.1; 255 means 0 */
	int device; /* index in the device list */
	uint32_t shared; /* size of a shared receive queue; no SRQ if 0 */
};

struct side {
	struct options options;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *memory;
	uint32_t psn;
};

/* the connection data that two applications exchange out of band */
struct address {
	union ibv_gid gid;
	uint64_t memory;
	uint32_t rkey;
	uint32_t qpn;
	uint32_t psn;
	uint16_t port; /* IP port of the process, derived from qpn */
};

/* ---- queue pair numbers: which process ------------------------------------------------------ */

enum {
	FIRST_PORT = 14792,
	/* Processes with a device use only the first 1,000 ports. */
	FIRST_FREE = FIRST_PORT + 1000,
	LAST_PORT = FIRST_PORT + 1023,
	/* RoCE ignores the DLID, and some applications store a UDP source port in it. */
	ANY_DLID = 0xbeef,
};

/*
 * Increment the low byte of a key like ibv_inc_rkey(3). The byte starts at a random value, so it
 * may wrap around.
 */
static inline uint32_t next_key(uint32_t rkey)
{
	return (rkey & ~0xffu) | ((rkey + 1) & 0xff);
}

static inline uint16_t port_of_number(uint32_t qpn)
{
	return (uint16_t)(FIRST_PORT + (qpn >> 14));
}

static inline uint32_t number_at(uint16_t port, uint32_t local)
{
	return (uint32_t)(port - FIRST_PORT) << 14 | local;
}

/*
 * Bind a socket to a loopback port that no device uses. Returns the port. The queue pair numbers
 * that belong to it are higher than those of any device.
 */
static inline uint16_t bind_device_port(int fd)
{
	struct sockaddr_in here = {.sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	uint16_t port = LAST_PORT;

	for (; port >= FIRST_FREE; port--) {
		here.sin_port = htons(port);
		if (!bind(fd, (const struct sockaddr *)&here, sizeof(here)))
			return port;
	}
	CHECK(!"a port is free");
	return 0;
}

/*
 * Fill in the abstract socket address at which the process that owns `port` listens for peers on
 * its host. Returns the length of the address.
 */
static inline socklen_t attach_address(uint16_t port, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	int length =
		snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "aiordma/%u", port);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

__attribute__((constructor)) static void find_calls(void)
{
	verbs = aiordma_embedded_calls();
}

static inline struct ibv_context *open_device_at(int number)
{
	int count;

	struct ibv_device **list = verbs->ibv_get_device_list(&count);

	CHECK(number < count && !list[count]);
	struct ibv_context *context = verbs->ibv_open_device(list[number]);

	CHECK(context);
	verbs->ibv_free_device_list(list);
	return context;
}

static inline struct ibv_context *open_device(void)
{
	return open_device_at(0);
}

static inline struct ibv_qp *create_qp(struct side *side)
{
	const struct options *options = &side->options;
	struct ibv_qp_init_attr init = {
		.qp_context = side,
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.srq = side->srq,
		.cap =
			{
				.max_send_wr = options->sends ? options->sends : 64,
				.max_recv_wr = options->receives ? options->receives : 64,
				.max_send_sge = options->sges ? options->sges : 4,
				.max_recv_sge = options->sges ? options->sges : 4,
				.max_inline_data = 256,
			},
		.qp_type = options->ud   ? IBV_QPT_UD
			   : options->uc ? IBV_QPT_UC
					 : IBV_QPT_RC,
		.sq_sig_all = !options->signal_none,
	};
	struct ibv_qp *qp = verbs->ibv_create_qp(side->pd, &init);

	CHECK(qp);
	if (options->ends_with_peer)
		verbs->device->end_with_peer(qp);
	return qp;
}

/* Returns the value of `options.gid` that selects GID `index`. */
static inline uint8_t gid_at(int index)
{
	return index ? (uint8_t)index : 255;
}

/* Returns the GID index of the first IPv4 loopback address, or 0 if the table has none. */
static inline uint8_t loopback_index(struct ibv_context *context)
{
	static const uint8_t loopback[] = {[10] = 0xff, 0xff, 127};
	union ibv_gid gid;

	for (int i = 0; !verbs->ibv_query_gid(context, 1, i, &gid); i++)
		if (!memcmp(gid.raw, loopback, sizeof(loopback)))
			return (uint8_t)i;
	return 0;
}

static inline void open_side(struct side *side, struct options options)
{
	static uint32_t psns = 1;

	memset(side, 0, sizeof(*side));
	if (!options.memory)
		options.memory = 65536;
	side->options = options;
	side->context = open_device_at(options.device);
	side->options.gid = options.gid ? options.gid % 255 : loopback_index(side->context);
	CHECK(side->pd = verbs->ibv_alloc_pd(side->context));
	CHECK(side->channel = verbs->ibv_create_comp_channel(side->context));
	CHECK(side->cq = verbs->ibv_create_cq(side->context, options.cqe ? options.cqe : 256, side,
					      side->channel, options.comp_vector));
	side->memory = mmap(NULL, options.memory, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(side->memory != MAP_FAILED);
	CHECK(side->mr = verbs->ibv_reg_mr(side->pd, side->memory, options.memory, ALL_RIGHTS));
	if (options.shared) {
		struct ibv_srq_init_attr init = {
			.srq_context = side,
			.attr = {.max_wr = options.shared,
				 .max_sge = options.sges ? options.sges : 4},
		};

		CHECK(side->srq = verbs->ibv_create_srq(side->pd, &init));
	}
	side->qp = create_qp(side);
	/* Each side starts at a different PSN, so that the PSNs of some sides wrap around. */
	side->psn = (0xfffff0u + __atomic_fetch_add(&psns, 1, __ATOMIC_RELAXED) * 2654435761u +
		     (uint32_t)getpid()) &
		    0xffffff;
}

static inline void destroy_qp(struct side *side)
{
	CHECK_OK(verbs->ibv_destroy_qp(side->qp));
	side->qp = NULL;
}

/* Close a side. The test must set the members that it has closed itself to NULL. */
static inline void close_side(struct side *side)
{
	if (side->qp)
		destroy_qp(side);
	if (side->srq)
		CHECK_OK(verbs->ibv_destroy_srq(side->srq));
	if (side->cq)
		CHECK_OK(verbs->ibv_destroy_cq(side->cq));
	CHECK_OK(verbs->ibv_destroy_comp_channel(side->channel));
	if (side->mr)
		CHECK_OK(verbs->ibv_dereg_mr(side->mr));
	CHECK_OK(verbs->ibv_dealloc_pd(side->pd));
	if (side->context)
		CHECK_OK(verbs->ibv_close_device(side->context));
	munmap(side->memory, side->options.memory);
}

static inline struct address address_of_side(const struct side *side)
{
	struct address address = {
		.qpn = side->qp->qp_num,
		.port = port_of_number(side->qp->qp_num),
		.psn = side->psn,
		.memory = (uintptr_t)side->memory,
		.rkey = side->mr ? side->mr->rkey : 0,
	};

	CHECK_OK(verbs->ibv_query_gid(side->context, 1, side->options.gid, &address.gid));
	return address;
}

/* ---- states -------------------------------------------------------------------------------- */

static inline int to_init(struct side *side)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = side->options.rights ? side->options.rights : ALL_RIGHTS,
	};

	return verbs->ibv_modify_qp(side->qp, &attr,
				    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					    IBV_QP_ACCESS_FLAGS);
}

static inline uint8_t or_default(uint8_t value, uint8_t standard, uint8_t zero)
{
	return value == 0 ? standard : value == zero ? 0 : value;
}

static inline int to_rtr(struct side *side, const struct address *peer)
{
	const struct address own = address_of_side(side);
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = side->options.mtu ? side->options.mtu : IBV_MTU_4096,
		.rq_psn = peer->psn,
		.dest_qp_num = peer->qpn,
		/* If the address of the peer has no GID, the peer is on this host. */
		.ah_attr = {.grh = {.dgid = peer->gid.global.interface_id ? peer->gid : own.gid,
				    .sgid_index = side->options.gid,
				    .traffic_class = side->options.traffic_class},
			    .dlid = ANY_DLID,
			    .is_global = 1,
			    .port_num = 1},
		.max_dest_rd_atomic = side->options.answers
					      ? side->options.answers
					      : or_default(side->options.depth, 4, 255),
		.min_rnr_timer = or_default(side->options.rnr_timer, 1, 255),
	};

	return verbs->ibv_modify_qp(
		side->qp, &attr,
		IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			(side->options.uc ? 0 : IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

static inline int to_rts(struct side *side)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.timeout = or_default(side->options.timeout, 20, 255),
		.retry_cnt = or_default(side->options.retry_cnt, 7, 8),
		.rnr_retry = or_default(side->options.rnr_retry, 7, 8),
		.sq_psn = side->psn,
		.max_rd_atomic = or_default(side->options.depth, 4, 255),
	};

	return verbs->ibv_modify_qp(side->qp, &attr,
				    IBV_QP_STATE | IBV_QP_SQ_PSN |
					    (side->options.uc ? 0
							      : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
									IBV_QP_RNR_RETRY |
									IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline int to_state(struct side *side, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};

	return verbs->ibv_modify_qp(side->qp, &attr, IBV_QP_STATE);
}

static inline void enter_state(struct side *side, enum ibv_qp_state state)
{
	CHECK_OK(to_state(side, state));
}

static inline enum ibv_qp_state state_of(struct side *side)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CHECK_OK(verbs->ibv_query_qp(side->qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

static inline void expect_state(struct side *side, enum ibv_qp_state state)
{
	CHECK_EQUAL(state_of(side), state);
}

static inline void bring_up(struct side *side, const struct address *peer)
{
	CHECK_OK(to_init(side));
	CHECK_OK(to_rtr(side, peer));
	CHECK_OK(to_rts(side));
}

static inline void dereg(struct ibv_mr *mr)
{
	CHECK_OK(verbs->ibv_dereg_mr(mr));
}

/* Deregister the side's own memory region. */
static inline void dereg_own(struct side *side)
{
	dereg(side->mr);
	side->mr = NULL;
}

/* Connect two sides of this process. */
static inline void connect_pair(struct side *a, struct side *b)
{
	struct address address_a = address_of_side(a), address_b = address_of_side(b);

	bring_up(a, &address_b);
	bring_up(b, &address_a);
}

/* Reset and reconnect both queue pairs after an error. */
static inline void connect_again(struct side *a, struct side *b)
{
	enter_state(a, IBV_QPS_RESET);
	enter_state(b, IBV_QPS_RESET);
	connect_pair(a, b);
}

static inline void open_pair(struct side *a, struct side *b, struct options options)
{
	open_side(a, options);
	open_side(b, options);
	connect_pair(a, b);
}

/* Open a side with options given by name: OPEN(&side, .uc = true). */
#define OPEN(side, ...) open_side(side, (struct options){__VA_ARGS__})
/* Open and connect two sides with the same options: OPEN_PAIR(&a, &b, .uc = true). */
#define OPEN_PAIR(a, b, ...) open_pair(a, b, (struct options){__VA_ARGS__})

static inline void close_pair(struct side *a, struct side *b)
{
	close_side(a);
	close_side(b);
}

/* Run a test step with a new connected pair: PAIR(fence, .memory = BIG) calls fence(&a, &b). */
#define PAIR(test, ...)                                                                            \
	do {                                                                                       \
		struct side a, b;                                                                  \
		current_step = #test;                                                              \
		OPEN_PAIR(&a, &b, __VA_ARGS__);                                                    \
		test(&a, &b);                                                                      \
		close_pair(&a, &b);                                                                \
	} while (0)

/* Run a test step with one new side, which is not connected: SIDE(step) calls step(&side). */
#define SIDE(test, ...)                                                                            \
	do {                                                                                       \
		struct side side;                                                                  \
		current_step = #test;                                                              \
		OPEN(&side, __VA_ARGS__);                                                          \
		test(&side);                                                                       \
		close_side(&side);                                                                 \
	} while (0)

/* Run a test step with a new `struct stage`, which the test program must define. */
#define STAGE(test, ...)                                                                           \
	do {                                                                                       \
		struct stage stage;                                                                \
		current_step = #test;                                                              \
		open_stage(&stage, (struct options){__VA_ARGS__});                                 \
		test(&stage);                                                                      \
		close_stage(&stage);                                                               \
	} while (0)

/* ---- two processes ------------------------------------------------------------------------- */

struct process {
	pid_t child; /* 0 in the child itself */
	int fd; /* socket connected to the other process */
};

/* Fork a child that is connected by a socket pair. Call this before opening a device. */
static inline struct process process_split(void)
{
	struct process process;
	int fds[2];

	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds));
	fflush(NULL);
	process.child = fork();
	CHECK(process.child >= 0);
	if (!process.child)
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* kills even a stopped child on parent exit */
	close(fds[process.child ? 1 : 0]);
	process.fd = fds[process.child ? 0 : 1];
	return process;
}

static inline void process_send(const struct process *process, const void *data, size_t length)
{
	CHECK_EQUAL(write(process->fd, data, length), length);
}

static inline void process_receive(const struct process *process, void *data, size_t length)
{
	CHECK_EQUAL(recv(process->fd, data, length, MSG_WAITALL), length);
}

/* Wait until the other process has reached the barrier too. */
static inline void process_barrier(const struct process *process)
{
	char byte = 0;

	process_send(process, &byte, 1);
	process_receive(process, &byte, 1);
}

static inline struct address exchange_addresses(const struct process *process,
						const struct side *side)
{
	struct address own = address_of_side(side), peer;

	process_send(process, &own, sizeof(own));
	process_receive(process, &peer, sizeof(peer));
	return peer;
}

/* Exit if this is the child. In the parent, check that the child exits with status 0. */
static inline void process_join(const struct process *process)
{
	int status;

	close(process->fd);
	if (!process->child)
		_exit(0);
	CHECK_EQUAL(waitpid(process->child, &status, 0), process->child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- work requests ------------------------------------------------------------------------- */

static inline int post_recv_wr(struct side *side, struct ibv_recv_wr *wr)
{
	struct ibv_recv_wr *bad;

	return side->srq ? side->context->ops.post_srq_recv(side->srq, wr, &bad)
			 : side->context->ops.post_recv(side->qp, wr, &bad);
}

static inline int post_recv_at(struct side *side, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)side->memory + offset,
		.length = length,
		.lkey = side->mr->lkey,
	};

	return post_recv_wr(side,
			    &(struct ibv_recv_wr){.wr_id = wr_id, .sg_list = &sge, .num_sge = 1});
}

static inline void post_receive_at(struct side *side, uint64_t wr_id, size_t offset,
				   uint32_t length)
{
	CHECK_OK(post_recv_at(side, wr_id, offset, length));
}

/* Post a receive with an lkey that belongs to no region. */
static inline void post_wrong_recv(struct side *side, uint64_t wr_id, uint32_t length)
{
	struct ibv_sge sge = {(uintptr_t)side->memory, length, 0x12345};
	struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1};

	CHECK_OK(post_recv_wr(side, &wr));
}

struct request {
	enum ibv_wr_opcode opcode;
	unsigned flags;
	uint64_t wr_id;
	size_t offset;
	uint32_t length;
	uint32_t imm;
	uint64_t remote;
	uint32_t rkey;
	uint64_t compare_add, swap;
	uint32_t lkey; /* the side's own lkey if 0 */
	uint32_t srqn; /* SRQ number, for XRC only */
};

static inline int post_wr(struct side *side, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;

	return side->context->ops.post_send(side->qp, wr, &bad);
}

/* Post up to eight requests in one call, so that nothing can happen between them. */
static inline int post_chain(struct side *side, const struct request *requests, int count)
{
	struct ibv_sge sges[8];
	struct ibv_send_wr wrs[8];

	CHECK(count <= 8);
	for (int i = 0; i < count; i++) {
		const struct request *request = &requests[i];

		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)side->memory + request->offset,
			.length = request->length,
			.lkey = request->lkey ? request->lkey : side->mr->lkey,
		};
		wrs[i] = (struct ibv_send_wr){
			.wr_id = request->wr_id,
			.next = i + 1 < count ? &wrs[i + 1] : NULL,
			.sg_list = &sges[i],
			.num_sge = request->length ? 1 : 0,
			.opcode = request->opcode,
			.send_flags = request->flags,
			.imm_data = request->imm,
			.qp_type.xrc.remote_srqn = request->srqn,
		};
		if (request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		    request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wrs[i].wr.atomic.remote_addr = request->remote;
			wrs[i].wr.atomic.rkey = request->rkey;
			wrs[i].wr.atomic.compare_add = request->compare_add;
			wrs[i].wr.atomic.swap = request->swap;
		} else {
			wrs[i].wr.rdma.remote_addr = request->remote;
			wrs[i].wr.rdma.rkey = request->rkey;
		}
	}
	return post_wr(side, wrs);
}

static inline int post(struct side *side, struct request request)
{
	return post_chain(side, &request, 1);
}

/* Post a request and check for success: POST(&a, IBV_WR_SEND, .wr_id = 1, .length = 8). */
#define POST(side, ...) CHECK_OK(post(side, (struct request){.opcode = __VA_ARGS__}))
/* The remote address and rkey for a request to offset `at` in the memory of the side `of`. */
#define REMOTE(of, at) .remote = (uintptr_t)(of)->memory + (at), .rkey = (of)->mr->rkey
/* The remote address and rkey for a request to offset `at`, taken from the peer's address. */
#define AT(peer, at) .remote = (peer)->memory + (at), .rkey = (peer)->rkey

static inline void post_recvs(struct side *side, uint64_t first, unsigned count, uint32_t length)
{
	for (unsigned i = 0; i < count; i++)
		post_receive_at(side, first + i, 0, length);
}

/* ---- completions --------------------------------------------------------------------------- */

static inline int poll_cq(struct side *side, int room, struct ibv_wc *wc)
{
	return side->context->ops.poll_cq(side->cq, room, wc);
}

/* the time after which a missing completion is considered lost, even under a sanitizer */
#define COMPLETION_NS (120 * 1000000000ull)

/*
 * Wait for the next completion and return it. If none arrives within COMPLETION_NS, print the state
 * of the queue pair and exit.
 */
static inline struct ibv_wc next_wc(struct side *side)
{
	uint64_t since = now_ns(CLOCK_MONOTONIC);
	struct ibv_wc wc;
	int n;

	while ((n = poll_cq(side, 1, &wc)) == 0) {
		sched_yield();
		if (now_ns(CLOCK_MONOTONIC) - since > COMPLETION_NS) {
			fprintf(stderr, "in %s: no completion; queue pair %u is in state %d\n",
				current_step, side->qp->qp_num, side->qp->state);
			exit(1);
		}
	}
	CHECK_EQUAL(n, 1);
	return wc;
}

static inline struct ibv_wc expect_wc(struct side *side, uint64_t wr_id, enum ibv_wc_status status)
{
	struct ibv_wc wc = next_wc(side);

	if (wc.wr_id != wr_id || wc.status != status) {
		fprintf(stderr, "in %s: completion %llu with %s, expected %llu with %s\n",
			current_step, (unsigned long long)wc.wr_id,
			verbs->ibv_wc_status_str(wc.status), (unsigned long long)wr_id,
			verbs->ibv_wc_status_str(status));
		exit(1);
	}
	CHECK_EQUAL(wc.qp_num, side->qp->qp_num);
	return wc;
}

static inline struct ibv_wc expect_done(struct side *side, uint64_t wr_id)
{
	return expect_wc(side, wr_id, IBV_WC_SUCCESS);
}

static inline void expect_no_wc(struct side *side)
{
	struct ibv_wc wc;

	CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
}

/* Post a request, and check that the next completion belongs to it and has `status`. */
static inline struct ibv_wc run_request(struct side *side, enum ibv_wc_status status,
					struct request request)
{
	CHECK_OK(post(side, request));
	return expect_wc(side, request.wr_id, status);
}

#define RUN(side, status, ...) run_request(side, status, (struct request){.opcode = __VA_ARGS__})
#define DO(side, ...) RUN(side, IBV_WC_SUCCESS, __VA_ARGS__)

static inline void expect_no_event(struct side *side)
{
	struct ibv_async_event event;
	int flags = fcntl(side->context->async_fd, F_GETFL);

	CHECK_OK(fcntl(side->context->async_fd, F_SETFL, flags | O_NONBLOCK));
	CHECK_FAILS(verbs->ibv_get_async_event(side->context, &event), EAGAIN);
	CHECK_OK(fcntl(side->context->async_fd, F_SETFL, flags));
}

static inline void expect_event(struct side *side, enum ibv_event_type type)
{
	struct ibv_async_event event;

	CHECK_OK(verbs->ibv_get_async_event(side->context, &event));
	if (event.event_type != type) {
		fprintf(stderr, "in %s: event '%s', expected '%s'\n", current_step,
			verbs->ibv_event_type_str(event.event_type),
			verbs->ibv_event_type_str(type));
		exit(1);
	}
	verbs->ibv_ack_async_event(&event);
}

static inline void fill(uint8_t *at, size_t length, unsigned seed)
{
	for (size_t i = 0; i < length; i++)
		at[i] = (uint8_t)(seed + i * 7 + (i >> 8));
}

static inline bool is_filled(const uint8_t *at, size_t length, unsigned seed)
{
	for (size_t i = 0; i < length; i++)
		if (at[i] != (uint8_t)(seed + i * 7 + (i >> 8)))
			return false;
	return true;
}

/* Read a value under the device's lock, since other threads may change it (engine/engine.h). */
#define LOCKED(expression)                                                                         \
	__extension__({                                                                            \
		soft_lock();                                                                       \
		__auto_type value_ = (expression);                                                 \
		soft_unlock();                                                                     \
		value_;                                                                            \
	})

/* ---- several steps at once ------------------------------------------------------------------ */

/*
 * Connect a queue pair to `peer`. Post `count` receives, numbered from `first`, before the first
 * message can arrive.
 */
static inline void bring_up_receiving(struct side *side, const struct address *peer, uint64_t first,
				      unsigned count, uint32_t length)
{
	CHECK_OK(to_init(side));
	post_recvs(side, first, count, length);
	CHECK_OK(to_rtr(side, peer));
	CHECK_OK(to_rts(side));
}

/* Send eight bytes from `a` (wr_id 2) and check that `b` receives them (wr_id 1). */
static inline void send_one_message(struct side *a, struct side *b)
{
	post_receive_at(b, 1, 0, 8);
	RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_wc(b, 1, IBV_WC_SUCCESS);
}

/*
 * Fork, open a side in each process, and connect the two. Both post `receives` receives (wr_id 1)
 * before connecting. Returns the address of the other process's side.
 */
static inline struct address open_peers(struct process *process, struct side *side,
					struct options options, unsigned receives, uint32_t length)
{
	*process = process_split();
	limit_seconds(60);
	open_side(side, options);
	struct address peer = exchange_addresses(process, side);

	CHECK_OK(to_init(side));
	for (unsigned i = 0; i < receives; i++)
		post_receive_at(side, 1, 0, length);
	CHECK_OK(to_rtr(side, &peer));
	CHECK_OK(to_rts(side));
	return peer;
}

static inline void close_peers(const struct process *process, struct side *side)
{
	process_barrier(process);
	close_side(side);
	process_join(process);
}

/* Check that the next two completions are successful, for example those of a send and a receive. */
static inline void expect_two(struct side *side)
{
	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(next_wc(side).status, IBV_WC_SUCCESS);
}

/* Returns whether all other threads of the process are sleeping. */
static inline bool are_others_asleep(void)
{
	DIR *tasks = opendir("/proc/self/task");
	bool asleep = true;

	for (struct dirent *entry; (entry = readdir(tasks));) {
		char path[300], line[200] = "";
		int fd;

		if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/stat", entry->d_name);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			continue; /* it has ended */
		if (read(fd, line, sizeof(line) - 1) > 0)
			asleep &= !strncmp(strrchr(line, ')'), ") S", 3);
		close(fd);
	}
	closedir(tasks);
	return asleep;
}

/*
 * Fork while all other threads sleep. GCC 12's address sanitizer does not reset its allocator's
 * locks in the child, which would hang if the device's thread held one of them during the fork.
 */
static inline pid_t fork_asleep(void)
{
	fflush(NULL);
	while (!are_others_asleep())
		sched_yield();
	return fork();
}

static inline void expect_exit_success(pid_t child)
{
	int status;

	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, 0);
}

/* Call `run` in a child process. Returns the child's wait status. */
static inline int run_in_child(void (*run)(void))
{
	int status;

	pid_t child = fork_asleep();

	CHECK(child >= 0);
	if (!child) {
		limit_seconds(60);
		run();
		exit(0);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	return status;
}

static inline void in_child(void (*run)(void))
{
	CHECK_EQUAL(run_in_child(run), 0);
}

/* Returns whether AIORDMA_EMBEDDED_LINKS is `kind`. If it is unset, processes on one host use shared
 * memory. */
static inline bool links_are(const char *kind)
{
	const char *links = getenv("AIORDMA_EMBEDDED_LINKS");

	return !strcmp(links ? links : "shared", kind);
}

/* ---- standard error output ------------------------------------------------------------------ */

struct capture {
	int before; /* duplicate of the original standard error */
	int ends[2]; /* pipe that receives the captured output */
};

static inline struct capture capture_stderr(void)
{
	struct capture capture = {.before = dup(2)};

	CHECK(capture.before >= 0);
	CHECK_OK(pipe(capture.ends));
	CHECK_EQUAL(dup2(capture.ends[1], 2), 2);
	return capture;
}

/* Restore standard error, and store the captured output in `text` as a string. */
static inline void end_capture(const struct capture *capture, char *text, size_t room)
{
	ssize_t n, at = 0;

	CHECK_EQUAL(dup2(capture->before, 2), 2);
	close(capture->before);
	close(capture->ends[1]);
	while ((n = read(capture->ends[0], text + at, room - 1 - (size_t)at)) > 0)
		at += n;
	text[at] = '\0';
	close(capture->ends[0]);
}

/*
 * Check that opening the device fails with EINVAL if the environment variable `name` is `value`,
 * and that the message on standard error contains `expected`.
 */
static inline void expect_setting_refused(const char *name, const char *value, const char *expected)
{
	char text[200];
	int count;

	CHECK_OK(setenv(name, value, 1));
	struct capture capture = capture_stderr();
	struct ibv_device **list = verbs->ibv_get_device_list(&count);

	errno = 0;
	struct ibv_context *context = verbs->ibv_open_device(list[0]);
	int why = errno;

	end_capture(&capture, text, sizeof(text));
	CHECK(!context);
	CHECK_EQUAL(why, EINVAL);
	verbs->ibv_free_device_list(list);
	CHECK(strstr(text, expected));
	CHECK_OK(unsetenv(name));
}

/* ---- sockets ------------------------------------------------------------------------------- */

/*
 * Returns the number of unread bytes in the sockets bound to port `at`. The file `path` is a kernel
 * table such as /proc/net/udp.
 */
static inline unsigned queued_at(const char *path, uint16_t at)
{
	unsigned port, queued, sum = 0;
	char line[512];
	FILE *sockets = fopen(path, "r");

	while (sockets && fgets(line, sizeof(line), sockets))
		if (sscanf(line, " %*d: %*[0-9A-F]:%x %*s %*s %*x:%x", &port, &queued) == 2 &&
		    port == at)
			sum += queued;
	if (sockets)
		fclose(sockets);
	return sum;
}
