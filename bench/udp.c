/* Measures round trips of 64-byte UDP datagrams, as a baseline for RoCE v2.
 *
 *   udp OWN PEER WAITING [asks]
 *
 * OWN and PEER are the IPv4 addresses of the two sides. If WAITING is "polling", the program polls
 * for datagrams. For any other word, it sleeps until a datagram arrives.
 *
 * With `asks`, the program reads the number of round trips from each line of its input, and prints
 * half of the average round-trip time in seconds. Without `asks`, it echoes datagrams until it is
 * killed.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

enum { SIZE = 64, PORT = 5790 /* for sleeping sides; polling sides use PORT + 1 */ };

static int channel, flags;

static void give(void)
{
	static const char bytes[SIZE];

	/* ECONNREFUSED reports that the peer's host refused an earlier datagram, because the peer
	 * had not started yet (udp(7)). */
	while (send(channel, bytes, SIZE, 0) < 0)
		if (errno != ECONNREFUSED)
			err(1, "send");
}

static void take(int how)
{
	char bytes[SIZE];

	while (recv(channel, bytes, SIZE, how) < 0)
		if (errno == ECONNREFUSED || (errno == EAGAIN && !how))
			give();
		else if (errno != EAGAIN)
			err(1, "recv");
}

int main(int argc, char **argv)
{
	const struct timeval again = {.tv_usec = 100000};
	struct sockaddr_in ends[2];

	channel = socket(AF_INET, SOCK_DGRAM, 0);
	flags = strcmp(argv[3], "polling") ? 0 : MSG_DONTWAIT;
	for (int i = 0; i < 2; i++)
		ends[i] = (struct sockaddr_in){
			.sin_family = AF_INET,
			.sin_port = htons(PORT + !!flags),
			.sin_addr.s_addr = inet_addr(argv[1 + i]),
		};
	if (bind(channel, (struct sockaddr *)&ends[0], sizeof(ends[0])) ||
	    connect(channel, (struct sockaddr *)&ends[1], sizeof(ends[1])))
		err(1, "%s", argv[1]);
	while (argc == 4) {
		take(flags);
		give();
	}
	setsockopt(channel, SOL_SOCKET, SO_RCVTIMEO, &again, sizeof(again));
	for (int count; scanf("%d", &count) == 1; fflush(stdout)) {
		struct timespec from, to;

		give(); /* the peer may not have started yet */
		take(0);
		clock_gettime(CLOCK_MONOTONIC, &from);
		for (int i = 0; i < count; i++) {
			give();
			take(flags);
		}
		clock_gettime(CLOCK_MONOTONIC, &to);
		printf("%.9f\n", ((double)(to.tv_sec - from.tv_sec) +
				  (double)(to.tv_nsec - from.tv_nsec) / 1e9) /
					 count / 2);
	}
	return 0;
}
