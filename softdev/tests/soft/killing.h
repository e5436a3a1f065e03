/* Processes that are killed, stopped or leave at any moment, and what the survivor counts.
 *
 * All peers are forked before the survivor opens a device, each waits for its order; so one more of
 * them costs nothing but a message.  The survivor runs in namespaces of its own where it may (as
 * root, or where users may make namespaces): then what is in /tmp, /dev/shm and among the abstract
 * sockets at the end has been left behind by these processes.
 */
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <malloc.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "leaks.h"
#include "verbs_side.h"

#define SECOND 1000000000ull
#define MILLISECOND 1000000ull

/* What has not come by then never does. */
#define PATIENCE (60 * SECOND)

/* ---- time ---------------------------------------------------------------------------------- */

/* Time that this process has seen pass, from 1 on: a machine that stands still for seconds, as a
 * virtual one may, is no reason to give up waiting.  Called again and again. */
static inline uint64_t watched_ns(void)
{
	static uint64_t last, sum = 1;
	uint64_t now = now_ns(CLOCK_MONOTONIC), most = 100 * MILLISECOND;

	if (last)
		sum += now - last < most ? now - last : most;
	last = now;
	return sum;
}

/* ---- chance -------------------------------------------------------------------------------- */

/* Same seed, same decisions; when they fall, and what they hit, is the machine's chance. */
static uint64_t chance_state = 88172645463325252u;

static inline uint32_t chance(uint32_t below)
{
	chance_state ^= chance_state << 13;
	chance_state ^= chance_state >> 7;
	chance_state ^= chance_state << 17;
	return (uint32_t)(chance_state >> 32) % below;
}

/* Every other time up to 65 ms, each magnitude as often as the others: that is in the handshake.
 * Else up to 130 ms: in the middle of traffic. */
static inline uint64_t moment_ns(void)
{
	uint64_t most = 1000ull << (1 + chance(16));

	return chance(2) ? most / 2 + chance((uint32_t)(most / 2)) : 1000ull * chance(130000);
}

/* ---- a place of its own -------------------------------------------------------------------- */

static bool isolated;
static int own_entries; /* of /tmp, that are ours */

static inline bool put_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	bool put = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (fd >= 0)
		close(fd);
	return put;
}

static inline bool namespaces(void)
{
	unsigned uid = getuid();
	char map[64];

	if (unshare(CLONE_NEWNS | CLONE_NEWNET) == 0)
		return true;
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET))
		return false;
	snprintf(map, sizeof(map), "%u %u 1", uid, uid);
	CHECK(put_text("/proc/self/uid_map", map));
	return true;
}

/* Where we are, if that is in /tmp, stays to be seen there: what counts coverage writes beside the
 * program when it ends. */
static inline bool empty_tmp(void)
{
	char here[PATH_MAX], source[64];

	CHECK(getcwd(here, sizeof(here)));
	if (strncmp(here, "/tmp/", 5))
		return mount("none", "/tmp", "tmpfs", 0, NULL) == 0;
	*strchrnul(here + 5, '/') = 0;
	int fd = open(here, O_PATH | O_CLOEXEC);

	CHECK(fd >= 0);
	snprintf(source, sizeof(source), "/proc/self/fd/%d", fd);
	bool done = mount("none", "/tmp", "tmpfs", 0, NULL) == 0 && mkdir(here, 0700) == 0 &&
		    mount(source, here, NULL, MS_BIND | MS_REC, NULL) == 0;

	close(fd);
	own_entries = 1;
	return done;
}

static inline void isolate(void)
{
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	int fd;

	isolated = namespaces() && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
		   empty_tmp() && mount("none", "/dev/shm", "tmpfs", 0, NULL) == 0;
	if (!isolated) {
		printf("no namespaces for this user: what is left in the file system is not looked "
		       "at\n");
		return;
	}
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(fd >= 0);
	CHECK_EQUAL(ioctl(fd, SIOCSIFFLAGS, &loopback), 0);
	close(fd);
}

/* ---- peers --------------------------------------------------------------------------------- */

enum { PEERS_MOST = 900 };

static struct peer {
	pid_t pid;
	int fd; /* to it; -1: no more */
} peers[PEERS_MOST];
static int peer_count, peers_used;

/* In the peer: does what is ordered through the fd; may leave when it likes. */
typedef void (*peer_body)(int fd);

static inline void prepare_peers(int count, peer_body body)
{
	struct rlimit files = {0};

	CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &files), 0);
	files.rlim_cur = files.rlim_max;
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &files), 0);
	CHECK(count <= PEERS_MOST);
	fflush(NULL);
	for (int i = 0; i < count; i++) {
		int fds[2];
		pid_t pid;

		CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			alarm(0);
			close(fds[0]);
			for (int other = 0; other < i; other++)
				close(peers[other].fd);
			chance_state += (uint64_t)i * 2654435761u;
			body(fds[1]);
			_exit(0);
		}
		close(fds[1]);
		peers[i] = (struct peer){.pid = pid, .fd = fds[0]};
	}
	peer_count = count;
}

static inline struct peer *next_peer(void)
{
	CHECK(peers_used < peer_count);
	return &peers[peers_used++];
}

/* True when it is dead; it may be so only by a signal or with status 0. */
static inline bool peer_is_gone(struct peer *peer)
{
	int status;
	pid_t pid = waitpid(peer->pid, &status, WNOHANG);

	CHECK(pid == 0 || pid == peer->pid);
	if (pid == 0)
		return false;
	if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) &&
	    !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
		fprintf(stderr, "in %s: a peer ended with status %#x\n", current_step,
			(unsigned)status);
		exit(1);
	}
	close(peer->fd);
	peer->fd = -1;
	return true;
}

/* Until it cannot run any more. */
static inline void stop_peer(struct peer *peer)
{
	int status;

	CHECK_EQUAL(kill(peer->pid, SIGSTOP), 0);
	CHECK_EQUAL(waitpid(peer->pid, &status, WUNTRACED), peer->pid);
	CHECK(WIFSTOPPED(status));
}

static inline void dismiss_peers(void)
{
	for (int i = 0; i < peer_count; i++)
		if (peers[i].fd >= 0) {
			close(peers[i].fd);
			peers[i].fd = -1;
			CHECK_EQUAL(kill(peers[i].pid, SIGKILL), 0);
			CHECK_EQUAL(waitpid(peers[i].pid, NULL, 0), peers[i].pid);
		}
}

/* ---- what becomes of them ------------------------------------------------------------------ */

enum fate {
	KILLED,
	STOPPED_AND_KILLED,
	STOPPED_AND_KILLED_LATER,
	LEAVES,      /* by itself */
	LEFT_BEHIND, /* by the survivor, in the middle of its traffic, and then killed */
};

struct fated {
	struct peer *peer; /* NULL: none is under way */
	enum fate fate;
	uint64_t next_ns; /* something is done then */
	uint64_t gone_ns; /* it is dead since; 0: alive */
	bool stopped;
};

/* The next peer, with one of the first so many fates. */
static inline struct fated next_fated(uint32_t fates)
{
	return (struct fated){
		.peer = next_peer(),
		.fate = chance(fates),
		.next_ns = now_ns(CLOCK_MONOTONIC) + moment_ns(),
	};
}

/* Its moment has come, or one of its moments. */
static inline void act(struct fated *it, bool may_stop)
{
	bool stop = it->fate == STOPPED_AND_KILLED || it->fate == STOPPED_AND_KILLED_LATER;

	it->next_ns = UINT64_MAX;
	if (it->fate == LEAVES)
		return;
	if (stop && !it->stopped && may_stop) {
		stop_peer(it->peer);
		it->stopped = true;
	} else if (it->fate == STOPPED_AND_KILLED_LATER && it->stopped) {
		CHECK_EQUAL(kill(it->peer->pid, SIGCONT), 0);
		it->fate = KILLED;
	} else {
		CHECK_EQUAL(kill(it->peer->pid, SIGKILL), 0);
		it->gone_ns = watched_ns();
		return;
	}
	it->next_ns = now_ns(CLOCK_MONOTONIC) + moment_ns();
}

enum {
	AT_ONCE = 3 /* peers, beside the witness */
};

/* So many peers, a few at once.  `begin` is the order to the next one; `step` is false when all that
 * its end has to bring about has been seen; `go_on`: the survivor's other work. */
static inline void rounds(int count, struct fated *(*round)(int), void (*begin)(int),
			  bool (*step)(int), void (*go_on)(void))
{
	int begun = 0, under_way = 0;

	while (begun < count || under_way) {
		for (int i = 0; i < AT_ONCE; i++) {
			if (!round(i)->peer && begun < count) {
				begin(i);
				begun++;
				under_way++;
			} else if (round(i)->peer && !step(i)) {
				round(i)->peer = NULL;
				under_way--;
			}
		}
		go_on();
	}
}

/* Once for every wire that two processes of one machine can have. */
static inline void survive_on_each_wire(void (*survive)(const char *wire), unsigned seconds)
{
	static const char *const wires[] = {"tcp", "shared"};

	for (size_t i = 0; i < sizeof(wires) / sizeof(wires[0]); i++) {
		int status;
		pid_t pid;

		fflush(NULL);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			limit_seconds(seconds);
			isolate();
			CHECK_EQUAL(setenv("AIORDMA_EMBEDDED_LINKS", wires[i], 1), 0);
			survive(wires[i]);
			exit(0);
		}
		CHECK_EQUAL(waitpid(pid, &status, 0), pid);
		CHECK_EQUAL(status, 0);
	}
}

/* ---- what the survivor holds --------------------------------------------------------------- */

struct held {
	int files;
	int threads;
	int shared; /* mappings of memory that is shared through a file descriptor */
	size_t memory;
};

static inline int entries_in(const char *path)
{
	return entries_of(path) - 2; /* . and .. */
}

static inline int lines_with(const char *path, const char *word)
{
	FILE *file = fopen(path, "r");
	char line[512];
	int count = 0;

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		count += strstr(line, word) != NULL;
	fclose(file);
	return count;
}

static inline struct held held_now(void)
{
	struct held held = {
		.files = entries_in("/proc/self/fd"),
		.threads = entries_in("/proc/self/task"),
		.shared = lines_with("/proc/self/maps", "memfd:"),
		.memory = mallinfo2().uordblks + mallinfo2().hblkhd, /* 0 under sanitizers */
	};

	for (int i = 0; i < peer_count; i++)
		held.files -= peers[i].fd >= 0;
	return held;
}

/* The survivor is back where it was, when the links that linger have gone. */
static inline void expect_held(const struct held *before)
{
	enum { SLACK = 256 << 10 }; /* tables have grown */
	uint64_t end = watched_ns() + PATIENCE;
	struct held now;

	do {
		now = held_now();
		sched_yield();
	} while ((now.files != before->files || now.threads != before->threads ||
		  now.shared != before->shared || now.memory > before->memory + SLACK) &&
		 watched_ns() < end);
	CHECK_EQUAL(now.files, before->files);
	CHECK_EQUAL(now.threads, before->threads);
	CHECK_EQUAL(now.shared, before->shared);
	CHECK(now.memory <= before->memory + SLACK);
}

/* When the device is closed and all other processes are dead. */
static inline void expect_nothing_left(void)
{
	if (!isolated)
		return;
	CHECK_EQUAL(entries_in("/tmp"), own_entries);
	CHECK_EQUAL(entries_in("/dev/shm"), 0);
	CHECK_EQUAL(lines_with("/proc/net/unix", "@"), 0);
}

/* ---- how soon ------------------------------------------------------------------------------ */

static uint64_t notices[PEERS_MOST];
static int notice_count;

static inline void noticed_after(uint64_t ns)
{
	if (notice_count < PEERS_MOST)
		notices[notice_count++] = ns;
}

static inline int by_size(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

/* For the reader: how soon depends on what else the machine does. */
static inline void tell_notices(const char *what)
{
	CHECK(notice_count > 0);
	qsort(notices, (size_t)notice_count, sizeof(notices[0]), by_size);
	printf("%s: noticed %d times, after %.2f ms in the median, %.1f ms at most\n", what,
	       notice_count, (double)notices[notice_count / 2] / 1e6,
	       (double)notices[notice_count - 1] / 1e6);
}
