/* How two processes come to share memory, and how they part.
 *
 * Every process with a data listener has a door: a Unix socket in the abstract name space, which
 * belongs to the network name space as LIDs do, under a name made of its LID.  Nothing of it is in
 * the file system.  Who wants to share memory comes to the door, is looked at (both ask the kernel for
 * the other's user, which must be their own), makes the memory and hands it over.  The socket stays:
 * its end is the end of the neighbour.
 *
 *   the visitor   HELLO, its LID, the memory, and its bell; it may write into its ring at once
 *   the host      READY and its bell, or the end of the socket
 *   both          LID: mine is another one now.
 *
 * The kernel tells of a process's death by its pidfd, also where a child still holds the socket.
 */
#define _GNU_SOURCE /* accept4, struct ucred */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm_internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

enum {
	BACKLOG = 256,
	STRANGERS = 64, /* who have said nothing yet */
	VISITS_PER_STEP = 16,
};

#define PATIENCE_NS 10000000000u
#define REST_NS 100000000u

enum word {
	HELLO = 1,
	READY,
	LID
};

enum {
	MEMORY,
	BELL,
	FDS
}; /* that come with HELLO; with READY the second one */

struct message {
	uint32_t word;
	uint32_t lid;
};

static void knocked(struct soft_source *source, uint32_t events);
static void rest_over(struct soft_timer *timer);

static struct soft_source door = {.fd = -1, .ready = knocked, .of_port = true};
static struct soft_timer rest = {.expired = rest_over};
static uint16_t own_lid;

static struct soft_node strangers = {&strangers, &strangers}; /* in the order of their coming */
static unsigned stranger_count;

/* ---- messages ------------------------------------------------------------------------------ */

static bool tell(const struct soft_neighbour *neighbour, enum word word, const int *fds, int count)
{
	struct message message = {word, own_lid};
	struct iovec bytes = {&message, sizeof(message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control = {0};
	struct msghdr letter = {.msg_iov = &bytes, .msg_iovlen = 1};

	if (count) {
		size_t length = (size_t)count * sizeof(*fds);

		letter.msg_control = &control;
		letter.msg_controllen = CMSG_LEN(length);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(length);
		memcpy(CMSG_DATA(&control.header), fds, length);
	}
	return sendmsg(neighbour->socket.fd, &letter, MSG_NOSIGNAL | MSG_DONTWAIT) ==
	       (ssize_t)sizeof(message);
}

static void close_fds(int fds[FDS])
{
	for (int i = 0; i < FDS; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

/* 1: a message, with the fds that came with it or -1; 0: none now; -1: the end. */
static int hear(const struct soft_neighbour *neighbour, struct message *message, int fds[FDS])
{
	struct iovec bytes = {message, sizeof(*message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control;
	struct msghdr letter = {
		.msg_iov = &bytes,
		.msg_iovlen = 1,
		.msg_control = neighbour->up ? NULL : &control,
		.msg_controllen = neighbour->up ? 0 : sizeof(control),
	};
	ssize_t n = recvmsg(neighbour->socket.fd, &letter, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	for (int i = 0; i < FDS; i++)
		fds[i] = -1;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&letter);

	/* There is room for so many, and the kernel has closed what was beyond it. */
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
		size_t length = header->cmsg_len - CMSG_LEN(0);

		memcpy(fds, CMSG_DATA(header),
		       length < FDS * sizeof(*fds) ? length : FDS * sizeof(*fds));
	}
	return n == (ssize_t)sizeof(*message) && message->lid <= UINT16_MAX ? 1 : -1;
}

/* ---- the two of them ----------------------------------------------------------------------- */

static void leave_strangers(struct soft_neighbour *neighbour)
{
	if (!soft_list_empty(&neighbour->stranger))
		stranger_count--;
	soft_list_remove(&neighbour->stranger);
}

static void close_source(struct soft_source *source)
{
	soft_unwatch(source);
	if (source->fd >= 0)
		close(source->fd);
	source->fd = -1;
}

void soft_meeting_end(struct soft_neighbour *neighbour)
{
	leave_strangers(neighbour);
	soft_timer_stop(&neighbour->patience);
	close_source(&neighbour->socket);
	close_source(&neighbour->process);
	soft_bell_close(&neighbour->bell);
}

static void waited_in_vain(struct soft_timer *timer)
{
	soft_neighbour_finish(soft_container(timer, struct soft_neighbour, patience), ECONNREFUSED);
}

static void died(struct soft_source *source, uint32_t events)
{
	(void)events;
	soft_neighbour_part(soft_container(source, struct soft_neighbour, process));
}

/* One of our user?  Then we shall be told when it dies; if it lives where we cannot see it (another
 * process name space), by its socket alone. */
static bool look_at(struct soft_neighbour *neighbour)
{
	struct ucred who;
	socklen_t length = sizeof(who);
	int fd = -1;

	if (getsockopt(neighbour->socket.fd, SOL_SOCKET, SO_PEERCRED, &who, &length) ||
	    who.uid != geteuid())
		return false;
	neighbour->pid = who.pid;
	length = sizeof(fd);
	if (getsockopt(neighbour->socket.fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) && who.pid)
		fd = (int)syscall(SYS_pidfd_open, who.pid, 0);
	neighbour->process.fd = fd;
	return true;
}

static void heard(struct soft_source *source, uint32_t events);

static struct soft_neighbour *with_socket(int fd)
{
	struct soft_neighbour *neighbour = soft_neighbour_create();

	if (!neighbour) {
		close(fd);
		return NULL;
	}
	neighbour->socket = (struct soft_source){.fd = fd, .ready = heard, .of_port = true};
	neighbour->process = (struct soft_source){.fd = -1, .ready = died, .of_port = true};
	neighbour->patience.expired = waited_in_vain;
	soft_timer_start(&neighbour->patience, soft_now() + PATIENCE_NS);
	if (look_at(neighbour) && !soft_watch(&neighbour->socket, EPOLLIN))
		return neighbour;
	soft_neighbour_finish(neighbour, ECONNREFUSED);
	return NULL;
}

/* Both have the memory. */
static bool come_up(struct soft_neighbour *neighbour)
{
	soft_timer_stop(&neighbour->patience);
	neighbour->up = true;
	return neighbour->process.fd < 0 || !soft_watch(&neighbour->process, EPOLLIN);
}

static bool hang_bell(struct soft_neighbour *neighbour, int fds[FDS])
{
	int fd = fds[BELL];

	fds[BELL] = -1;
	return fd >= 0 && soft_bell_hang(&neighbour->bell, fd);
}

static bool hello(struct soft_neighbour *neighbour, const struct message *message, int fds[FDS])
{
	leave_strangers(neighbour);
	neighbour->lid = (uint16_t)message->lid;
	if (fds[MEMORY] < 0 || soft_memory_check(fds[MEMORY]) ||
	    soft_memory_enter(neighbour, fds[MEMORY], false) || !hang_bell(neighbour, fds) ||
	    soft_bell_make(&neighbour->bell))
		return false;
	return tell(neighbour, READY, &neighbour->bell.end, 1) && come_up(neighbour);
}

/* The only one that comes with READY. */
static bool ready(struct soft_neighbour *neighbour, int fds[FDS])
{
	int first = fds[0];

	fds[0] = fds[BELL];
	fds[BELL] = first;
	return hang_bell(neighbour, fds) && come_up(neighbour);
}

/* False: it does not belong here. */
static bool understood(struct soft_neighbour *neighbour, const struct message *message,
		       int fds[FDS])
{
	bool visitor = !neighbour->memory; /* the host has made nothing */

	switch (message->word) {
	case HELLO:
		return visitor && hello(neighbour, message, fds);
	case READY:
		return !visitor && !neighbour->up && ready(neighbour, fds);
	case LID:
		neighbour->lid = (uint16_t)message->lid;
		return neighbour->up;
	default:
		return false;
	}
}

static void heard(struct soft_source *source, uint32_t events)
{
	struct soft_neighbour *neighbour = soft_container(source, struct soft_neighbour, socket);
	struct message message;
	int fds[FDS];

	(void)events;
	/* One: if there are more, epoll says so. */
	int rc = hear(neighbour, &message, fds);

	if (rc == 1 && !understood(neighbour, &message, fds))
		rc = -1;
	close_fds(fds);
	if (rc < 0)
		soft_neighbour_part(neighbour);
	else if (neighbour->up)
		soft_attention_visit(neighbour);
}

/* ---- bells --------------------------------------------------------------------------------- */

static bool listen_to(struct soft_neighbour *neighbour)
{
	bool rings = soft_bell_hear(&neighbour->bell);

	neighbour->asked = false;
	if (!rings)
		soft_neighbour_part(neighbour);
	return rings;
}

static void rung(struct soft_source *source, uint32_t events)
{
	struct soft_neighbour *neighbour =
		soft_container(source, struct soft_neighbour, bell.source);

	(void)events;
	if (listen_to(neighbour) && neighbour->up)
		soft_attention_visit(neighbour);
}

void soft_meeting_hush(struct soft_neighbour *neighbour)
{
	listen_to(neighbour);
}

void soft_meeting_ring(struct soft_neighbour *neighbour)
{
	soft_bell_ring(&neighbour->bell);
}

void soft_meeting_init(struct soft_neighbour *neighbour)
{
	neighbour->socket.fd = neighbour->process.fd = -1;
	soft_bell_init(&neighbour->bell, rung);
}

/* ---- the visitor --------------------------------------------------------------------------- */

static socklen_t name_of(uint16_t lid, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	/* The first byte stays zero: an abstract name. */
	int length =
		snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "aiordma/%u", lid);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static bool bring_memory(struct soft_neighbour *neighbour)
{
	int fd = soft_memory_make();
	bool done = false;

	if (fd < 0)
		return false;
	if (!soft_memory_enter(neighbour, fd, true) && !soft_bell_make(&neighbour->bell)) {
		const int fds[FDS] = {[MEMORY] = fd, [BELL] = neighbour->bell.end};

		done = tell(neighbour, HELLO, fds, FDS);
	}
	close(fd);
	return done;
}

struct soft_neighbour *soft_meeting_begin(uint16_t lid)
{
	struct sockaddr_un address;
	socklen_t length = name_of(lid, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return NULL;
	if (connect(fd, (struct sockaddr *)&address, length)) {
		close(fd);
		return NULL;
	}
	struct soft_neighbour *neighbour = with_socket(fd);

	if (!neighbour)
		return NULL;
	if (!bring_memory(neighbour)) {
		soft_neighbour_finish(neighbour, ECONNREFUSED);
		return NULL;
	}
	neighbour->lid = lid;
	return neighbour;
}

/* ---- the host ------------------------------------------------------------------------------ */

static void rest_over(struct soft_timer *timer)
{
	(void)timer;
	soft_watch(&door, EPOLLIN);
}

static void let_in(int fd)
{
	if (stranger_count == STRANGERS)
		soft_neighbour_finish(
			soft_list_entry(strangers.next, struct soft_neighbour, stranger), 0);
	struct soft_neighbour *neighbour = with_socket(fd);

	if (!neighbour)
		return;
	soft_list_append(&strangers, &neighbour->stranger);
	stranger_count++;
}

static void knocked(struct soft_source *source, uint32_t events)
{
	(void)events;
	for (int i = 0; i < VISITS_PER_STEP; i++) {
		int fd = accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd >= 0) {
			let_in(fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
			/* Ready for ever, and nothing could be done about it. */
			soft_unwatch(source);
			soft_timer_start(&rest, soft_now() + REST_NS);
		}
		return;
	}
}

static void tell_lid(struct soft_neighbour *neighbour)
{
	if (neighbour->up && neighbour->socket.fd >= 0)
		tell(neighbour, LID, NULL, 0);
}

/* Without a door there is TCP. */
void soft_meeting_open(uint16_t lid)
{
	struct sockaddr_un address;
	socklen_t length = name_of(lid, &address);

	soft_meeting_close();
	own_lid = lid;
	soft_neighbours_all(tell_lid);
	door.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (door.fd < 0)
		return;
	if (bind(door.fd, (struct sockaddr *)&address, length) || listen(door.fd, BACKLOG) ||
	    soft_watch(&door, EPOLLIN))
		soft_meeting_close();
}

void soft_meeting_close(void)
{
	soft_timer_stop(&rest);
	close_source(&door);
}

/* The sockets are closed already. */
void soft_meeting_forget(void)
{
	soft_list_init(&strangers);
	stranger_count = 0;
}
