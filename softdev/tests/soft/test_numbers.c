/* Test queue pair numbers, which encode the process's port and are otherwise unpredictable. */
#define _GNU_SOURCE /* unshare */
#include "verbs_side.h"

#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

static bool is_bound(int type, uint16_t port)
{
	const struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	int fd = socket(AF_INET6, type | SOCK_CLOEXEC, 0);
	int rc;

	CHECK(fd >= 0);
	rc = bind(fd, (const struct sockaddr *)&any, sizeof(any));
	CHECK(!rc || errno == EADDRINUSE);
	close(fd);
	return rc;
}

static struct ibv_qp *create_next_qp(struct side *side)
{
	side->qp = create_qp(side);
	CHECK(side->qp->qp_num > 1 && side->qp->qp_num < 0xffffff);
	return side->qp;
}

/* Check that all numbers of a process encode the same port, which is bound for TCP and UDP, and
 * that the other bits are random. */
static void qp_numbers_encode_the_port_and_are_random(struct side *side)
{
	enum { COUNT = 200 };
	struct ibv_qp *qps[COUNT];
	unsigned bits_set = 0;

	uint16_t port = port_of_number(side->qp->qp_num);

	qps[0] = side->qp;
	CHECK(port >= FIRST_PORT && port < FIRST_FREE);
	CHECK(is_bound(SOCK_STREAM, port) && is_bound(SOCK_DGRAM, port));
	for (int i = 1; i < COUNT; i++) {
		qps[i] = create_next_qp(side);
		CHECK_EQUAL(port_of_number(qps[i]->qp_num), port);
		for (int j = 0; j < i; j++)
			CHECK(qps[j]->qp_num != qps[i]->qp_num);
		bits_set += (unsigned)__builtin_popcount((qps[i]->qp_num ^ qps[i - 1]->qp_num) &
							 0x3fff);
	}
	/* On average, 7 of the 14 random bits differ between two numbers. Over 200 numbers, the
	 * average practically never deviates by a whole bit. */
	CHECK(bits_set > (COUNT - 1) * 6 && bits_set < (COUNT - 1) * 8);
	for (int i = 0; i < COUNT; i++)
		CHECK_OK(verbs->ibv_destroy_qp(qps[i]));
	side->qp = NULL;
}

/* Check that a number is not reused soon, so that late packets for a destroyed queue pair do not
 * reach another one. */
static void qp_number_is_not_reused_soon(struct side *side)
{
	enum { COUNT = 2048 };
	static uint8_t given[1 << 14];

	destroy_qp(side);
	for (int i = 0; i < COUNT; i++) {
		CHECK(!given[create_next_qp(side)->qp_num & 0x3fff]++);
		destroy_qp(side);
	}
}

/* Check that exactly as many queue pairs can be created as the device reports. */
static void max_qp_queue_pairs_can_be_created(struct side *side)
{
	struct ibv_device_attr device;
	struct ibv_qp **qps;

	destroy_qp(side);
	CHECK_OK(verbs->ibv_query_device(side->context, &device));
	CHECK(qps = calloc((size_t)device.max_qp, sizeof(*qps)));
	for (int i = 0; i < device.max_qp; i++)
		qps[i] = create_next_qp(side);
	struct ibv_qp_init_attr init = {.send_cq = side->cq,
					.recv_cq = side->cq,
					.cap = {.max_send_wr = 1, .max_send_sge = 1},
					.qp_type = IBV_QPT_RC};

	REFUSED(verbs->ibv_create_qp(side->pd, &init), ENOMEM);
	for (int i = 0; i < device.max_qp; i++)
		CHECK_OK(verbs->ibv_destroy_qp(qps[i]));
	free(qps);
	side->qp = NULL;
}

/* ---- ports that are taken ------------------------------------------------------------------- */

static int occupy_port(int type, uint16_t port)
{
	const struct sockaddr_in address = {.sin_family = AF_INET,
					    .sin_port = htons(port),
					    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_OK(bind(fd, (const struct sockaddr *)&address, sizeof(address)));
	return fd;
}

static int bind_unix_name(uint16_t port)
{
	struct sockaddr_un address;
	socklen_t length = attach_address(port, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_OK(bind(fd, (const struct sockaddr *)&address, length));
	return fd;
}

/* Check that the device skips a port that is in use for TCP, UDP or the Unix socket. If no port is
 * free, a queue pair cannot be created until a port is released. The test runs in its own network
 * namespace. */
static void device_skips_ports_that_are_in_use(void)
{
	enum {
		LEFT = 500 /* index of the only free port */
	};
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	struct rlimit files;
	struct side side;

	CHECK_OK(getrlimit(RLIMIT_NOFILE, &files));
	files.rlim_cur = files.rlim_max;
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &files));
	if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET)) {
		fprintf(stderr, "test_numbers: needs a network namespace: "
				"device_skips_ports_that_are_in_use left out\n");
		return;
	}
	CHECK_OK(ioctl(socket(AF_INET, SOCK_DGRAM, 0), SIOCSIFFLAGS, &loopback));
	for (int i = 0; i < 1000; i++) {
		uint16_t port = (uint16_t)(FIRST_PORT + i);

		if (i == LEFT)
			continue;
		if (i % 3 == 0)
			occupy_port(SOCK_STREAM, port);
		else if (i % 3 == 1)
			occupy_port(SOCK_DGRAM, port);
		else
			bind_unix_name(port);
	}
	OPEN(&side);
	CHECK_EQUAL(port_of_number(side.qp->qp_num), FIRST_PORT + LEFT);
	close_side(&side);

	int last = occupy_port(SOCK_STREAM, FIRST_PORT + LEFT);
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = verbs->ibv_alloc_pd(context);
	struct ibv_cq *cq = verbs->ibv_create_cq(context, 1, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD};

	REFUSED(verbs->ibv_create_qp(pd, &init), EADDRINUSE);
	close(last);
	struct ibv_qp *qp = verbs->ibv_create_qp(pd, &init);

	CHECK(qp);
	CHECK_EQUAL(port_of_number(qp->qp_num), FIRST_PORT + LEFT);
	CHECK_OK(verbs->ibv_destroy_qp(qp));
	CHECK_OK(verbs->ibv_destroy_cq(cq));
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	CHECK_OK(verbs->ibv_close_device(context));
}

int main(void)
{
	limit_seconds(60);
	SIDE(qp_numbers_encode_the_port_and_are_random);
	SIDE(qp_number_is_not_reused_soon);
	SIDE(max_qp_queue_pairs_can_be_created, .sends = 1, .receives = 1, .sges = 1);
	STEP(device_skips_ports_that_are_in_use());
	return 0;
}
