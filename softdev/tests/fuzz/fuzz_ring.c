/* Fuzz the shared memory between two processes of the same user. The peer writes anything to the
 * rings and their positions, and sends anything on the socket.
 *
 * The fuzzer attaches to the device (src/path/shm/attach.c) with a segment of its own. A queue pair
 * waits for a peer, which the fuzzer can claim to be. Memory that is not shared must be neither
 * changed nor disclosed. Every work request must complete once, two other queue pairs of the
 * process must keep working, and no resources may be left.
 */
#define _GNU_SOURCE /* memmem */
#include <stddef.h>
#include <sys/un.h>

#include "link/link.h"
#include "arena.h"

#include "path/shm/shm_internal.h"
#include "objects/objects.h"

enum { QUEUE = 16, PEER_PSN = 100, PEER_QPN = 2, PEER_PORT = FIRST_PORT };

/* The segment's layout, as in segment.c. */
enum { POSITIONS = 4096, POSITIONS_EACH = 256, RINGS = 8192 + 2 * SOFT_SHM_AREA };

static struct world {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mrs[AREAS];
	struct side friends[2], victim;
	uint16_t port;
	uint64_t posted, completed;
	uint32_t psn;
	int sockets;
	/* State of the fuzzer. */
	int fd; /* -1 if not attached */
	int notify[2]; /* pipe that wakes the device; -1 if closed */
	uint8_t *memory, *bytes[2];
	struct soft_ring out, in;
	uint32_t peer; /* the device's channel number; 0 if unknown */
} world = {.fd = -1, .notify = {-1, -1}};

static void open_world(void)
{
	int fds[2];

	world.context = open_device();
	CHECK(world.pd = verbs->ibv_alloc_pd(world.context));
	CHECK(world.cq = verbs->ibv_create_cq(world.context, 256, NULL, NULL, 0));
	soft_lock();
	world.port = soft_ip_port();
	soft_unlock();
	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
	for (int i = 0; i < 2; i++)
		OPEN(&world.friends[i], .memory = 4096);
	for (int i = 0; i < 2; i++) {
		bring_up(&world.friends[i], &(struct address){.psn = world.friends[1 - i].psn});
		soft_lock();
		CHECK_OK(soft_qp_adopt(soft_qp_of(world.friends[i].qp), fds[i], NULL, 0));
		soft_unlock();
	}
}

static void share(enum area_name name)
{
	CHECK(world.mrs[name] = verbs->ibv_reg_mr(world.pd, area_at(name), areas[name].length,
						  (int)areas[name].rights));
}

static void open_scene(void)
{
	struct side *side = &world.victim;

	for (int i = AREA_OPEN; i <= AREA_LOCAL; i++)
		share((enum area_name)i);
	*side = (struct side){
		.options = {.sends = QUEUE, .receives = QUEUE},
		.context = world.context,
		.pd = world.pd,
		.cq = world.cq,
		.memory = area_at(AREA_OPEN),
		.mr = world.mrs[AREA_OPEN],
		.psn = 0xfffffe,
	};
	side->qp = create_qp(side);
	bring_up(side, &(struct address){.psn = PEER_PSN, .qpn = PEER_QPN});
	world.psn = PEER_PSN;
	world.posted = world.completed = 0;
}

/* ---- the fuzzer ----------------------------------------------------------------------------- */

static void close_pipe(void)
{
	for (int i = 0; i < 2; i++) {
		if (world.notify[i] >= 0)
			close(world.notify[i]);
		world.notify[i] = -1;
	}
}

static void detach(void)
{
	if (world.fd >= 0)
		close(world.fd);
	world.fd = -1;
	close_pipe();
	if (!world.memory)
		return;
	munmap(world.memory, RINGS);
	for (int i = 0; i < 2; i++)
		soft_ring_unmap(world.bytes[i]);
	world.memory = NULL;
}

/* Send a message in the format of attach.c. If `with` is not -1, attach this memory descriptor and
 * the read end of a new notify pipe. */
static void send_attach_message(uint32_t word, uint32_t port, int with)
{
	uint32_t text[4] = {word, port};
	struct iovec bytes = {text, sizeof(text)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control = {0};
	struct msghdr letter = {.msg_iov = &bytes, .msg_iovlen = 1};

	if (world.fd < 0)
		return;
	if (with >= 0) {
		close_pipe();
		CHECK_OK(pipe2(world.notify, O_CLOEXEC));
		letter.msg_control = &control;
		letter.msg_controllen = sizeof(control);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(2 * sizeof(int));
		memcpy(CMSG_DATA(&control.header), (int[2]){with, world.notify[0]},
		       2 * sizeof(int));
	}
	(void)!sendmsg(world.fd, &letter, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static struct soft_ring_shared *positions(int ring)
{
	return (struct soft_ring_shared *)(void *)(world.memory + POSITIONS +
						   ring * POSITIONS_EACH);
}

/* Attach to the device. `wrong` selects an error: 1 clears the magic, 2 passes empty, unsealed
 * memory, and 3 passes no descriptors. */
static void attach_to_device(unsigned wrong)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int length = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "aiordma/%u",
			      world.port);
	int memory = soft_segment_make();

	detach();
	world.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	CHECK(memory >= 0 && world.fd >= 0);
	if (connect(world.fd, (struct sockaddr *)&address,
		    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length))) {
		close(memory);
		detach();
		return;
	}
	world.memory = mmap(NULL, RINGS, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	CHECK(world.memory != MAP_FAILED);
	for (int i = 0; i < 2; i++)
		CHECK(world.bytes[i] = soft_ring_map(memory, RINGS + (off_t)i * SOFT_RING_SIZE));
	soft_ring_init(&world.out, positions(0), world.bytes[0]);
	soft_ring_init(&world.in, positions(1), world.bytes[1]);
	if (wrong == 1)
		memset(world.memory, 0, 16);
	if (wrong == 2) {
		close(memory);
		memory = memfd_create("unsealed", MFD_CLOEXEC);
	}
	send_attach_message(1, PEER_PORT, wrong == 3 ? -1 : memory);
	close(memory);
	world.peer = 0;
}

/* Read the device's records, and check that they do not contain the secret. */
static void read_device_records(void)
{
	struct soft_record record;

	for (int i = 0; i < 1000 && world.memory && soft_ring_next(&world.in, &record) == 1; i++) {
		if (record.kind == 2)
			world.peer = record.from;
		CHECK(!memmem(record.payload, record.length, &arena.secret, sizeof(arena.secret)));
		soft_ring_release(&world.in, &record);
	}
}

static void put_record(const struct soft_record *record, const void *payload)
{
	const struct iovec iov = {(void *)(uintptr_t)payload, record->length};
	ssize_t room = world.memory ? soft_ring_room(&world.out, record->length) : 0;

	if (room > 0 && room >= (ssize_t)record->length)
		soft_ring_put(&world.out, record, &iov, 1);
}

static void send_hello(const uint8_t *r)
{
	uint8_t bytes[SOFT_HANDSHAKE_SIZE];

	soft_hello_encode(bytes, &(struct soft_hello){
					 .kind = r[1] & 1 ? SOFT_HELLO_ACK : SOFT_HELLO,
					 .from = PEER_QPN + (r[2] & 1),
					 .to = world.victim.qp->qp_num ^ (r[2] >> 1 & 1),
					 .receive_psn = 0xfffffe ^ (r[2] >> 2 & 1),
					 .send_psn = PEER_PSN ^ (r[2] >> 3 & 1),
					 .flags = r[3],
					 .mtu = IBV_MTU_4096,
				 });
	bytes[r[4] % SOFT_HANDSHAKE_SIZE] ^= r[5];
	put_record(&(struct soft_record){.kind = 1 + (r[6] & 1),
					 .to = r[7],
					 .from = 1 + r[8],
					 .length = SOFT_HANDSHAKE_SIZE - (r[9] & 7)},
		   bytes);
}

static void send_frame(const uint8_t *r)
{
	static const uint8_t opcodes[] = {SOFT_SEND, SOFT_WRITE, SOFT_READ,      SOFT_FETCH_ADD,
					  SOFT_ACK,  SOFT_NAK,   SOFT_READ_DATA, SOFT_DISCONNECT};
	static uint8_t bytes[SOFT_FRAME_HEADER + 0x4000];
	unsigned area = r[5] % (AREA_LOCAL + 2u);
	struct soft_frame frame = {
		.opcode = opcodes[r[1] & 7],
		.flags = r[2],
		.psn = soft_psn_add(world.psn, (uint32_t)(int8_t)r[3]),
		.length = fuzz16(r + 8) & 0x3fff,
		.address = (uintptr_t)area_at((enum area_name)area) +
			   (uint64_t)(int64_t)(int8_t)r[6] + (r[7] & 1 ? areas[area].length : 0),
		.rkey = area > AREA_LOCAL ? r[4] : world.mrs[area]->rkey,
		.ack = soft_psn_add(0xfffffe, (uint32_t)(int8_t)r[10]),
		.syndrome = r[11],
	};
	uint32_t length = SOFT_FRAME_HEADER + frame.length;

	frame.dma_length = frame.length + (r[12] & 1) * 64u;
	if (frame.opcode < SOFT_ACK && frame.syndrome > IBV_MTU_4096)
		frame.syndrome = 0; /* most frames announce no path MTU */
	if (r[12] & 2) {
		frame.length = 0;
		length = SOFT_FRAME_HEADER;
	}
	soft_frame_encode(bytes, &frame);
	memset(bytes + SOFT_FRAME_HEADER, r[13], frame.length);
	if (frame.opcode < SOFT_ACK && !r[3])
		world.psn = soft_psn_add(world.psn, 1);
	/* A record must contain whole frames, but this record may be truncated. */
	put_record(&(struct soft_record){.kind = 3,
					 .to = world.peer ^ (r[14] & 1),
					 .length = length - (r[15] < length ? r[15] : 0)},
		   bytes);
}

/* ---- what must hold -------------------------------------------------------------------------- */

static void take_completions(void)
{
	struct ibv_wc wc[16];
	int n;

	while ((n = world.context->ops.poll_cq(world.cq, 16, wc)) > 0)
		world.completed += (uint64_t)n;
	CHECK_EQUAL(n, 0);
	CHECK(world.completed <= world.posted);
}

static void expect_friends_work(void)
{
	struct side *a = &world.friends[0], *b = &world.friends[1];

	post_receive_at(b, 1, 8, 8);
	CHECK_OK(post(a, (struct request){.opcode = IBV_WR_SEND, .wr_id = 2, .length = 8}));
	expect_wc(b, 1, IBV_WC_SUCCESS);
	expect_wc(a, 2, IBV_WC_SUCCESS);
}

static void close_scene(void)
{
	fuzz_steps(8);
	read_device_records();
	CHECK_OK(to_state(&world.victim, IBV_QPS_ERR));
	fuzz_steps(4);
	take_completions();
	CHECK_EQUAL(world.completed, world.posted);
	CHECK_OK(verbs->ibv_destroy_qp(world.victim.qp));
	detach();
	fuzz_steps(4);
	fuzz_pass_time(UINT64_C(100000000000));
	fuzz_steps(4);
	for (int i = AREA_OPEN; i <= AREA_LOCAL; i++)
		dereg(world.mrs[i]);
	expect_friends_work();
	if (!world.sockets)
		world.sockets = fuzz_sockets();
	CHECK_EQUAL(fuzz_sockets(), world.sockets);
}

static void execute_record(const uint8_t *r)
{
	struct soft_ring_shared *shown;

	switch (r[0] & 15) {
	case 0:
		attach_to_device(r[1] & 0x80 ? r[1] & 3 : 0);
		break;
	case 1:
	case 2:
		send_hello(r);
		break;
	case 3:
	case 4:
	case 5:
	case 6:
		send_frame(r);
		break;
	case 7: /* record of any kind with arbitrary contents */
		put_record(&(struct soft_record){.kind = r[1],
						 .to = r[2] & 1 ? world.peer : r[2],
						 .from = r[3],
						 .length = r[4] % 12u},
			   r + 4);
		break;
	case 8: /* change a position */
		if (!world.memory)
			break;
		shown = positions(r[1] & 1);
		*(r[1] & 2 ? &shown->head : &shown->tail) +=
			(uint64_t)(int64_t)(int16_t)fuzz16(r + 2) << (r[4] & 63);
		break;
	case 9: /* corrupt a byte in a ring */
		if (world.memory)
			world.bytes[r[1] & 1][fuzz16(r + 2)] ^= r[4];
		break;
	case 10:
		send_attach_message(r[1] & 7, (uint32_t)fuzz16(r + 2) << (r[4] & 16), -1);
		break;
	case 11:
		read_device_records();
		break;
	case 12:
		fuzz_pass_time(fuzz16(r + 1) * UINT64_C(1000000));
		break;
	case 13:
		if (!post_recv_at(&world.victim, 0, r[1] * 4u, r[2] * 4u))
			world.posted++;
		break;
	case 14:
		if (!post(&world.victim,
			  (struct request){.opcode = r[1] & 1 ? IBV_WR_RDMA_READ : IBV_WR_SEND,
					   .length = r[2] * 16u}))
			world.posted++;
		break;
	case 15:
		if (r[1] & 1)
			detach();
		take_completions();
		break;
	}
	if (world.notify[1] >= 0)
		(void)!write(world.notify[1], "", 1);
	if (!(r[0] & 0x10))
		fuzz_steps(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	arena_prepare(fuzz_seed(data, size));
	if (!world.context)
		open_world();
	open_scene();
	attach_to_device(0);
	fuzz_steps(2);
	for (size_t at = 0; at + RECORD <= size; at += RECORD)
		execute_record(data + at);
	close_scene();
	arena_check_unharmed();
	return 0;
}
