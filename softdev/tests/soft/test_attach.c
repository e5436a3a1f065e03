/* Attaching to shared memory and detaching from it, also with peers that die, belong to other users
 * or violate the protocol. */
#define _GNU_SOURCE /* memfd_create, setresuid, unshare */
#include <sched.h>
#include "link/link_internal.h"
#include "shm_side.h"

#include "engine/engine_internal.h"
#include "leaks.h"
#include "path/shm/shm_internal.h"

static struct process process;

/* Split into two processes, and then start the device's engine in each. */
static void begin(void)
{
	process = process_split();
	limit_seconds(30);
	CHECK_OK(soft_engine_get());
}

static void finish(struct end *end)
{
	process_barrier(&process);
	end_done(end);
	soft_engine_put();
	process_join(&process);
}

static uint16_t port_of_parent(void)
{
	uint16_t port = 0;

	if (process.child) {
		port = own_port();
		process_send(&process, &port, sizeof(port));
	} else {
		process_receive(&process, &port, sizeof(port));
	}
	return port;
}

/* Split into two processes, and connect the child to the parent with a channel. */
static void begin_connected(struct end *end)
{
	uint16_t port;

	begin();
	end_init(end);
	if (process.child)
		accept_next(end);
	port = port_of_parent();
	if (!process.child)
		CHECK_OK(open_channel_to(end, port, 1));
	UNTIL(end, false, end->accepted);
}

/* ---- the end ------------------------------------------------------------------------------- */

enum { LAST_WORDS = 400000 };

/* Kill the child while the parent has unread data in the ring. All of it arrives before the channel
 * ends. */
static void data_sent_before_peer_death_arrives(void)
{
	struct end end;

	begin_connected(&end);
	if (!process.child) {
		process_receive(&process, &(char){0}, 1);
		send_now(&end, LAST_WORDS);
		process_send(&process, "", 1);
		for (;;)
			pause();
	}
	soft_lock(); /* prevents the parent from reading */
	process_send(&process, "", 1);
	process_receive(&process, &(char){0}, 1);
	CHECK_OK(kill(process.child, SIGKILL));
	CHECK_OK(waitid(P_PID, (id_t)process.child, &(siginfo_t){0}, WEXITED | WNOWAIT));
	CHECK_EQUAL(end.bytes, 0);
	soft_unlock();
	UNTIL(&end, false, end.gone);
	CHECK_EQUAL(end.error, ECONNRESET);
	CHECK_EQUAL(end.bytes, LAST_WORDS);
	CHECK_EQUAL(withdrawn_all, 1);
	withdrawn_all = 0;
	end_done(&end);
	soft_engine_put();
	close(process.fd);
	CHECK_EQUAL(waitpid(process.child, NULL, 0), process.child);
}

/* ---- visitors ------------------------------------------------------------------------------ */

enum { HELLO = 1, READY, NO_MESSAGE };

struct message {
	uint32_t type;
	uint32_t port;
	uint64_t secret_at;
};

static int connect_to_host(uint16_t port)
{
	struct sockaddr_un address;
	socklen_t length = attach_address(port, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_OK(connect(fd, (struct sockaddr *)&address, length));
	return fd;
}

static void send_message(int fd, const void *bytes, size_t length, const int *fds, int count)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(4 * sizeof(int))];
	} control = {0};
	struct iovec iov = {(void *)bytes, length};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

	if (count) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_LEN((size_t)count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = message.msg_controllen;
		memcpy(CMSG_DATA(&control.header), fds, (size_t)count * sizeof(int));
	}
	/* The host may have closed the connection already. */
	ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);

	CHECK(n == (ssize_t)length || errno == EPIPE || errno == ECONNRESET);
}

/* Expect the host to close the connection. */
static void expect_hang_up(int fd)
{
	struct message message;
	ssize_t n;

	while ((n = recv(fd, &message, sizeof(message), 0)) > 0)
		CHECK(message.type == READY);
	CHECK(n == 0 || errno == ECONNRESET);
	close(fd);
}

static int create_memory(size_t size, int seals, const char *beginning)
{
	int fd = memfd_create("visitor", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(fd >= 0);
	CHECK_OK(ftruncate(fd, (off_t)size));
	CHECK_EQUAL(pwrite(fd, beginning, 16, 0), 16);
	if (seals)
		CHECK_OK(fcntl(fd, F_ADD_SEALS, seals));
	return fd;
}

/* Send a HELLO with the given descriptors, and close them. A negative descriptor is left out. The
 * host must close the connection. */
static void expect_refused_with(uint16_t port, int memory, int pipe)
{
	struct message hello = {HELLO, 1, 0};
	int fd = connect_to_host(port), fds[2], count = 0;

	if (memory >= 0)
		fds[count++] = memory;
	if (pipe >= 0)
		fds[count++] = pipe;
	send_message(fd, &hello, sizeof(hello), fds, count);
	for (int i = 0; i < count; i++)
		close(fds[i]);
	expect_hang_up(fd);
}

static void expect_memory_refused(uint16_t port, int fd)
{
	int ends[2];

	CHECK_OK(pipe2(ends, O_CLOEXEC));
	expect_refused_with(port, fd, ends[0]);
	close(ends[1]);
}

/* Send descriptors that are not the read end of a pipe. */
static void descriptor_other_than_a_pipe_is_rejected(uint16_t port)
{
	int ends[2];

	expect_refused_with(port, soft_segment_make(), -1);
	expect_refused_with(port, soft_segment_make(), open("/dev/zero", O_RDWR));
	expect_refused_with(port, soft_segment_make(), eventfd(0, 0));
	/* A pipe whose write end is closed. */
	CHECK_OK(pipe2(ends, O_CLOEXEC));
	close(ends[1]);
	expect_refused_with(port, soft_segment_make(), ends[0]);
	/* The write end of a pipe. */
	CHECK_OK(pipe2(ends, O_CLOEXEC));
	expect_refused_with(port, soft_segment_make(), ends[1]);
	close(ends[0]);
}

/* Check that draining a pipe never blocks. The peer shares the file description and may clear
 * O_NONBLOCK. */
static void draining_a_pipe_never_blocks(void)
{
	struct soft_notify_pipe made, hung;

	soft_notify_pipe_init(&made, NULL);
	soft_notify_pipe_init(&hung, NULL);
	CHECK_OK(soft_notify_pipe_make(&made));
	soft_lock();
	CHECK(soft_notify_pipe_receive(&hung, dup(made.read_fd)));
	CHECK(!soft_notify_pipe_receive(&hung, dup(made.read_fd))); /* a second pipe is rejected */
	CHECK_OK(fcntl(made.read_fd, F_SETFL, 0));
	CHECK(soft_notify_pipe_drain(&hung));
	soft_notify_pipe_notify(&made);
	soft_notify_finish();
	CHECK(soft_notify_pipe_drain(&hung));
	CHECK(soft_notify_pipe_drain(&hung));
	soft_notify_pipe_close(&made);
	CHECK(!soft_notify_pipe_drain(&hung));
	soft_notify_pipe_close(&hung);
	soft_unlock();
}

static bool has_byte(int fd)
{
	struct pollfd ready = {.fd = fd, .events = POLLIN};

	return poll(&ready, 1, 0) == 1;
}

/* Notify more pipes than can be remembered until the lock is released. Each pipe must receive one
 * byte, and only the excess pipes may receive it while the lock is held. */
static void pipes_are_notified_after_lock_release(void)
{
	enum { PIPES = SOFT_MAX_NOTIFY_FDS + 2 };
	struct soft_notify_pipe pipes[PIPES];

	for (int i = 0; i < PIPES; i++) {
		soft_notify_pipe_init(&pipes[i], NULL);
		CHECK_OK(soft_notify_pipe_make(&pipes[i]));
	}
	soft_lock();
	for (int i = 0; i < PIPES; i++) {
		soft_notify_pipe_notify(&pipes[i]);
		CHECK_EQUAL(has_byte(pipes[i].read_fd), i >= SOFT_MAX_NOTIFY_FDS);
	}
	soft_unlock();
	for (int i = 0; i < PIPES; i++) {
		char bytes[2];

		CHECK_EQUAL(read(pipes[i].read_fd, bytes, sizeof(bytes)), 1);
	}
	/* Nothing must be written to a closed pipe, because another file may have its descriptor
	 * number by then. */
	int number = pipes[0].write_fd, ends[2];

	CHECK_OK(pipe(ends));
	soft_lock();
	soft_notify_pipe_notify(&pipes[0]);
	for (int i = 0; i < PIPES; i++)
		soft_notify_pipe_close(&pipes[i]);
	CHECK_EQUAL(dup2(ends[1], number), number);
	soft_unlock();
	CHECK(!has_byte(ends[0]));
	close(number);
	close(ends[0]);
	close(ends[1]);
}

/* Send descriptors that are not valid shared memory. */
static void invalid_shared_memory_is_rejected(uint16_t port)
{
	const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	int fd = soft_segment_make();
	off_t size = lseek(fd, 0, SEEK_END);
	char beginning[16], later[16];

	CHECK_EQUAL(pread(fd, beginning, 16, 0), 16);
	close(fd);
	memcpy(later, beginning, 16);
	later[8]++; /* another version */
	expect_memory_refused(port, -1);
	expect_memory_refused(port, open("/dev/zero", O_RDWR));
	expect_memory_refused(port, eventfd(0, 0));
	static const int too_few[] = {0, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_SEAL,
				      F_SEAL_SHRINK | F_SEAL_GROW};

	for (int i = 0; i < 4; i++)
		expect_memory_refused(port, create_memory((size_t)size, too_few[i], beginning));
	expect_memory_refused(port, create_memory((size_t)size - 4096, all, beginning));
	expect_memory_refused(port, create_memory((size_t)size, all | F_SEAL_WRITE, beginning));
	expect_memory_refused(port, create_memory((size_t)size, all, later));
	beginning[0]++; /* another protocol */
	expect_memory_refused(port, create_memory((size_t)size, all, beginning));
}

static void malformed_hello_is_rejected(uint16_t port)
{
	static const struct message messages[] = {
		{0, 0, 0}, {READY, 1, 0}, {NO_MESSAGE, 1, 0}, {77, 1, 0}, {HELLO, 70000, 0}};

	for (int i = 0; i < 5; i++) {
		int fd = connect_to_host(port);

		send_message(fd, &messages[i], sizeof(messages[i]), NULL, 0);
		expect_hang_up(fd);
	}
	int fd = connect_to_host(port), memory = soft_segment_make(), ends[2];

	CHECK_OK(pipe2(ends, O_CLOEXEC));
	int fds[4] = {memory, ends[0], memory, ends[0]};

	send_message(fd, &(struct message){HELLO, 1, 0}, sizeof(struct message), fds, 4);
	send_message(fd, &(struct message){HELLO, 1, 0}, sizeof(struct message), fds,
		     2); /* again */
	close(memory);
	expect_hang_up(fd);
	close(ends[0]);
	close(ends[1]);
}

/* Send messages of various lengths with too few or too many descriptors. */
static void messages_with_wrong_descriptor_count_are_rejected(uint16_t port)
{
	static const size_t lengths[] = {0, 1, sizeof(struct message) - 1, sizeof(struct message),
					 sizeof(struct message) + 1};
	static const uint32_t types[] = {HELLO, READY, NO_MESSAGE};

	FOR_EACH (i, lengths)
		FOR_EACH (j, types)
			for (int count = 1; count <= 4; count++) {
				const struct message messages[2] = {{types[j], 1, 0}};
				int fd = connect_to_host(port);

				send_message(fd, messages, lengths[i], (int[]){fd, fd, fd, fd},
					     count);
				expect_hang_up(fd);
			}
}

/* Send a HELLO with valid memory and a valid pipe, but of the wrong length or with one descriptor too
 * many. */
static void hello_with_wrong_length_or_extra_descriptor_is_rejected(uint16_t port)
{
	static const struct {
		size_t length;
		int descriptors;
	} wrong[] = {{sizeof(struct message) - 1, 2},
		     {sizeof(struct message) + 1, 2},
		     {sizeof(struct message), 3}};

	FOR_EACH (i, wrong) {
		const struct message hello[2] = {{HELLO, 1, 0}};
		int fd = connect_to_host(port), memory = soft_segment_make(), ends[2];
		char byte;

		CHECK_OK(pipe2(ends, O_CLOEXEC));
		send_message(fd, hello, wrong[i].length, (int[]){memory, ends[0], memory},
			     wrong[i].descriptors);
		CHECK_EQUAL(recv(fd, &byte, 1, 0), 0); /* no READY */
		close(fd);
		close(memory);
		close(ends[0]);
		close(ends[1]);
	}
}

static void notify(struct soft_shm_peer *host)
{
	soft_lock();
	soft_notify_pipe_notify(&host->pipe);
	soft_unlock();
}

/* Attach correctly, and then call `what` to violate the protocol. The host must close the
 * connection. */
static void attached_peer_is_dropped_on_violation(uint16_t port,
						  void (*what)(struct soft_shm_peer *host))
{
	struct soft_shm_peer host = {0};
	struct message message;
	int fd = connect_to_host(port), memory = soft_segment_make();

	soft_attach_init(&host);
	CHECK_OK(soft_notify_pipe_make(&host.pipe));
	int fds[2] = {memory, host.pipe.read_fd};

	/* The upper half of `port` contains two device numbers that no device can have. */
	send_message(fd, &(struct message){HELLO, 0xffff0001, 0}, sizeof(struct message), fds, 2);
	CHECK_EQUAL(recv(fd, &message, sizeof(message), 0), sizeof(message));
	CHECK_EQUAL(message.type, READY);
	CHECK_OK(soft_segment_map(&host, memory, SOFT_SEGMENT_CREATOR));
	close(memory);
	host.socket.fd = fd;
	what(&host);
	notify(&host);
	expect_hang_up(fd);
	soft_lock();
	soft_notify_pipe_close(&host.pipe);
	soft_unlock();
	soft_segment_unmap(&host);
}

static void record(struct soft_shm_peer *host, uint32_t kind, uint32_t to, uint32_t from,
		   uint32_t length)
{
	static uint8_t zeros[SOFT_MAX_RECORD];
	struct iovec iov = {zeros, length};

	soft_ring_put(&host->out, &(struct soft_record){kind, to, from, length, NULL}, &iov, 1);
}

static const struct wrong_record {
	uint32_t kind, from, length;
} wrong_records[] = {
	{5, 0, 0}, /* no such kind */
	{1, 8, SOFT_HANDSHAKE_SIZE - 1},
	{2, 8, SOFT_HANDSHAKE_SIZE + 1},
	{1, 0, SOFT_HANDSHAKE_SIZE}, /* no channel number for the response */
	{3, 0, 0}, /* DATA record without data */
};
static const struct wrong_record *wrong_record;

static void write_wrong_record(struct soft_shm_peer *host)
{
	record(host, wrong_record->kind, 0, wrong_record->from, wrong_record->length);
}

static void write_too_long_record(struct soft_shm_peer *host)
{
	const uint32_t length = 0xffffffff;

	record(host, 3, 7, 0, 100);
	memcpy(host->out.bytes + 12, &length, sizeof(length));
}

static void advance_tail_too_far(struct soft_shm_peer *host)
{
	host->out.shared->tail = 1ull << 40;
}

/* Send descriptors although both sides have received theirs. */
static void send_unexpected_descriptors(struct soft_shm_peer *host)
{
	const int fds[2] = {host->socket.fd, host->socket.fd};

	send_message(host->socket.fd, "", 0, fds, 2);
}

/* Keep requesting channels without reading the responses. */
static void request_without_reading(struct soft_shm_peer *host)
{
	for (uint32_t i = 1; i < 200000; i++) {
		uint8_t handshake[SOFT_HANDSHAKE_SIZE] = {REFUSE_ME};
		struct iovec iov = {handshake, sizeof(handshake)};
		struct pollfd over = {.fd = host->socket.fd, .events = POLLRDHUP};

		while (soft_ring_room(&host->out, SOFT_HANDSHAKE_SIZE) < SOFT_HANDSHAKE_SIZE) {
			if (poll(&over, 1, 0) && over.revents & (POLLRDHUP | POLLHUP))
				return;
			notify(host);
			sched_yield();
		}
		soft_ring_put(&host->out, &(struct soft_record){1, 0, i, sizeof(handshake), NULL},
			      &iov, 1);
	}
}

/* Keep requesting channels, and claim to have read data that was never written. */
static void claim_unwritten_reads(struct soft_shm_peer *host)
{
	host->in.shared->head = 1ull << 40;
	request_without_reading(host);
}

/* Open more silent connections than the host allows. The host must drop the oldest and still admit
 * a peer that sends a HELLO. */
static void oldest_silent_connection_is_dropped(uint16_t port)
{
	enum { MANY = 80 };
	int sockets[MANY];

	for (int i = 0; i < MANY; i++)
		sockets[i] = connect_to_host(port);
	for (int i = 0; i < MANY - 64; i++)
		expect_hang_up(sockets[i]);
	attached_peer_is_dropped_on_violation(port, advance_tail_too_far);
	for (int i = MANY - 64; i < MANY; i++)
		close(sockets[i]);
}

static void protocol_violations_do_not_disturb_other_peers(void)
{
	static void (*const vandals[])(struct soft_shm_peer *host) = {
		write_too_long_record, advance_tail_too_far, send_unexpected_descriptors,
		request_without_reading, claim_unwritten_reads};
	struct end end;

	begin_connected(&end);
	uint16_t port = port_of_parent();
	int before = count_entries("/proc/self/fd");

	process_barrier(&process);
	if (!process.child) {
		STEP(invalid_shared_memory_is_rejected(port));
		STEP(descriptor_other_than_a_pipe_is_rejected(port));
		STEP(draining_a_pipe_never_blocks());
		STEP(pipes_are_notified_after_lock_release());
		STEP(malformed_hello_is_rejected(port));
		STEP(messages_with_wrong_descriptor_count_are_rejected(port));
		STEP(hello_with_wrong_length_or_extra_descriptor_is_rejected(port));
		STEP(oldest_silent_connection_is_dropped(port));
		FOR_EACH (i, wrong_records) {
			wrong_record = &wrong_records[i];
			STEP(attached_peer_is_dropped_on_violation(port, write_wrong_record));
		}
		FOR_EACH (i, vandals)
			STEP(attached_peer_is_dropped_on_violation(port, vandals[i]));
	} else {
		accept_next(NULL);
	}
	process_barrier(&process);
	/* The channel of the well-behaved peer must still work, and no descriptor may leak. */
	send_now(&end, 5000);
	UNTIL(&end, false, end.bytes == 5000);
	if (process.child)
		UNTIL(&end, true, (soft_progress_try(), count_entries("/proc/self/fd") == before));
	CHECK_EQUAL(count_entries("/proc/self/fd"), before);
	finish(&end);
}

/* Check that the parent ignores the child, whose user ID is different or not mapped. If `known`,
 * the child must also notice this and fail to connect. */
static void expect_ignored(bool known)
{
	struct end end;

	CHECK_OK(soft_engine_get());
	uint16_t port = port_of_parent();

	end_init(&end);
	if (!process.child) {
		/* Either the child itself does not connect, or the parent refuses the channel. */
		if (open_channel_to(&end, port, 1) == 0) {
			CHECK(!known);
			UNTIL(&end, true, end.gone);
			CHECK_EQUAL(end.error, ECONNREFUSED);
		}
		CHECK(!end.accepted);
		expect_hang_up(connect_to_host(port));
		expect_memory_refused(port, soft_segment_make());
	}
	finish(&end);
}

/* Check that a process of another user can connect to the socket, but is ignored. */
static void process_of_another_user_is_ignored(void)
{
	if (geteuid()) {
		fprintf(stderr, "test_attach: needs root to be another user: "
				"process_of_another_user_is_ignored left out\n");
		return;
	}
	process = process_split();
	limit_seconds(30);
	if (!process.child)
		CHECK_OK(setresuid(65533, 65533, 65533)); /* not 65534, which means unmapped */
	expect_ignored(true);
}

static void run_with_unmapped_user(void)
{
	bool unmapped = false;

	process = process_split();
	limit_seconds(30);
	if (process.child) {
		unmapped = unshare(CLONE_NEWUSER) == 0;
		process_send(&process, &unmapped, sizeof(unmapped));
	} else {
		process_receive(&process, &unmapped, sizeof(unmapped));
	}
	if (unmapped) {
		expect_ignored(false);
		return;
	}
	if (process.child)
		fprintf(stderr, "test_attach: needs a user namespace: "
				"peers_with_unmapped_user_ids_are_ignored left out\n");
	process_join(&process);
}

/* Check that peers with unmapped user IDs are ignored. In a user namespace without a mapping, all
 * users appear to have the same ID. Run the test in a child, because a process cannot leave the
 * namespace. */
static void peers_with_unmapped_user_ids_are_ignored(void)
{
	in_child(run_with_unmapped_user);
}

int main(void)
{
	int before;

	limit_seconds(60);
	STEP(data_sent_before_peer_death_arrives());
	before = count_entries("/proc/self/fd");
	STEP(data_sent_before_peer_death_arrives());
	STEP(protocol_violations_do_not_disturb_other_peers());
	STEP(process_of_another_user_is_ignored());
	STEP(peers_with_unmapped_user_ids_are_ignored());
	CHECK_EQUAL(count_entries("/proc/self/fd"), before);
	return 0;
}
