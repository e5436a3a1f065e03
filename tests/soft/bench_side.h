/* What the programs that measure have in common: two processes on two cores, and TCP between them.
 */
#ifndef AIORDMA_TESTS_BENCH_SIDE_H
#define AIORDMA_TESTS_BENCH_SIDE_H

#include "verbs_side.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

static inline int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static inline double median(double *values, int count)
{
	qsort(values, (size_t)count, sizeof(*values), by_value);
	return values[count / 2];
}

static inline int tcp_pair(const struct process *process)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(address);
	const int on = 1;
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (process->child) {
		int listener = fd;

		CHECK_EQUAL(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
		CHECK_EQUAL(listen(listener, 1), 0);
		CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&address, &length), 0);
		tell(process, &address, sizeof(address));
		CHECK((fd = accept(listener, NULL, NULL)) >= 0);
		close(listener);
	} else {
		hear(process, &address, sizeof(address));
		CHECK_EQUAL(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return fd;
}

static inline void tcp_recv(int fd, uint8_t *at, size_t length, bool polling)
{
	while (length) {
		ssize_t n = recv(fd, at, length, polling ? MSG_DONTWAIT : 0);

		if (n < 0 && errno == EAGAIN)
			continue;
		CHECK(n > 0);
		at += n;
		length -= (size_t)n;
	}
}

static inline void tcp_send(int fd, const uint8_t *at, size_t length)
{
	while (length) {
		ssize_t n = send(fd, at, length, MSG_NOSIGNAL);

		CHECK(n > 0);
		at += n;
		length -= (size_t)n;
	}
}

/* Each process on a core of its own, if there are two. */
static inline void settle(const struct process *process)
{
	cpu_set_t all, own;
	int skip = process->child ? 1 : 0;

	CPU_ZERO(&own);
	if (sched_getaffinity(0, sizeof(all), &all) || CPU_COUNT(&all) < 2)
		return;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all) && skip-- == 0)
			CPU_SET(cpu, &own);
	sched_setaffinity(0, sizeof(own), &own);
}

#endif
