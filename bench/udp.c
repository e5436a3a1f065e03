/* UDP datagrams of 64 bytes there and back: what RoCE v2 is measured against.
 *
 *   udp OWN PEER WAITING [asks]
 *
 * Each line of the input of the side that asks says how many, and is answered by half the seconds
 * that one took.  Without more arguments it answers datagrams until it is killed.
 */
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

enum { SIZE = 64, PORT = 5790 /* of those that wait, and the next of those that poll */ };

static int channel, flags;

static void give(void)
{
	static const char bytes[SIZE];

	while (send(channel, bytes, SIZE, 0) <
	       0) /* what came back from a peer that is not there yet */
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

		give(); /* to where it may not be awaited yet */
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
