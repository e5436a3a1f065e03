/* Connections between processes: an echo, and what one side learns when the other is killed. */
#include "cm_silent_end.h"

#include <signal.h>
#include <sys/prctl.h>

/* How far a child comes. */
enum stage {
	LISTENS,
	TAKES, /* a request, and does nothing more */
	ACCEPTS,
	ECHOES, /* what comes on one connection, until the other side ends it */
	ASKS,
	CONNECTS
};

struct child {
	pid_t pid;
	int from, to;
};

static void say(int fd, uint16_t word)
{
	CHECK_EQUAL(write(fd, &word, sizeof(word)), sizeof(word));
}

static uint16_t hear(int fd)
{
	uint16_t word;

	CHECK_EQUAL(read(fd, &word, sizeof(word)), sizeof(word));
	return word;
}

static void expect_up(struct side *side)
{
	expect_status(side->channel, RDMA_CM_EVENT_ESTABLISHED, side->id, 0);
}

static void echo(struct side *server)
{
	side_completion(server, 2, IBV_WC_SUCCESS);
	memcpy(server->buffer, server->buffer + MESSAGE, MESSAGE);
	side_post_receive(server);
	side_post_send(server);
	side_completion(server, 1, IBV_WC_SUCCESS);
	expect_status(server->channel, RDMA_CM_EVENT_DISCONNECTED, server->id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(server->id), 0);
	side_completion(server, 2, IBV_WC_WR_FLUSH_ERR);
}

/* In the child, in which nothing of the device is there before. */
static void serve(enum stage stage, int to_parent)
{
	struct side listener = listen_at(host, 0), server = {0};

	say(to_parent, port_of(listener.id));
	if (stage >= TAKES)
		server = take_request(&listener);
	if (stage >= ACCEPTS) {
		accept_side(&server);
		expect_up(&server);
	}
	if (stage == ECHOES) {
		echo(&server);
		side_drop(&server);
		side_close(&listener);
	}
}

static struct child start(enum stage stage)
{
	struct child child;
	int down[2], up[2];
	uint8_t byte;

	CHECK_EQUAL(pipe(down), 0);
	CHECK_EQUAL(pipe(up), 0);
	child.pid = fork();
	CHECK(child.pid >= 0);
	if (child.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		limit_seconds(60);
		close(down[1]);
		close(up[0]);
		if (stage >= ASKS) {
			struct side client = ask(host, hear(down[0]));

			if (stage == CONNECTS)
				expect_up(&client);
		} else {
			serve(stage, up[1]);
		}
		say(up[1], 1);
		while (read(down[0], &byte, 1) > 0)
			;
		_exit(0);
	}
	close(down[0]);
	close(up[1]);
	child.from = up[0];
	child.to = down[1];
	return child;
}

static void finish(struct child *child, int expected)
{
	int status;

	close(child->to);
	CHECK_EQUAL(waitpid(child->pid, &status, 0), child->pid);
	CHECK_EQUAL(status, expected);
	close(child->from);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void echo_between_processes(void)
{
	struct child child = start(ECHOES);
	struct side client = ask(host, hear(child.from));

	expect_up(&client);
	memset(client.buffer, 0x7e, MESSAGE);
	side_post_send(&client);
	for (int i = 0; i < 2; i++) { /* what is sent and what comes, in either order */
		struct ibv_wc wc;

		while (client.id->verbs->ops.poll_cq(client.cq, 1, &wc) == 0)
			;
		CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
	}
	CHECK(memcmp(client.buffer, client.buffer + MESSAGE, MESSAGE) == 0);
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	expect_end(&client);
	side_close(&client);
	finish(&child, 0);
}

/* A killed process' kernel ends its streams: it is learned at once, and not as an orderly end. */
static void broken(struct side *side)
{
	struct rdma_cm_event *event = expect(side->channel, RDMA_CM_EVENT_DISCONNECTED, side->id);

	CHECK(on_system || event->status < 0);
	acknowledge(event);
	CHECK_EQUAL(rdma->rdma_disconnect(side->id), 0);
	side_completion(side, 2, IBV_WC_WR_FLUSH_ERR);
}

/* The other side is killed when it has come so far. */
static void killed(enum stage stage)
{
	struct child child = start(stage);
	struct side listener = {0}, own;

	if (stage >= ASKS) {
		listener = listen_at(host, 0);
		say(child.to, port_of(listener.id));
		own = take_request(&listener);
		if (stage == CONNECTS)
			accept_side(&own);
	} else {
		own = ask(host, hear(child.from));
	}
	if (stage == ACCEPTS || stage == CONNECTS)
		expect_up(&own);
	hear(child.from);
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	finish(&child, SIGKILL);
	if (stage == ACCEPTS || stage == CONNECTS)
		broken(&own);
	else if (stage == ASKS)
		expect_silent_end(&listener, &own);
	else if (on_system) /* the real CM says so in the dead one's name */
		expect_status(own.channel, RDMA_CM_EVENT_REJECTED, own.id, 28);
	else
		expect_status(own.channel, RDMA_CM_EVENT_CONNECT_ERROR, own.id, -ECONNRESET);
	if (stage >= ASKS) {
		side_drop(&own);
		side_close(&listener);
	} else {
		side_close(&own);
	}
}

/* Stopped, not dead: its kernel takes the connection, its connection manager does not answer; the
 * application gives up when it likes. */
static void server_stopped(void)
{
	struct child child = start(LISTENS);
	uint16_t port = hear(child.from);
	struct pollfd readable = {.events = POLLIN};
	struct side client;

	CHECK_EQUAL(kill(child.pid, SIGSTOP), 0);
	CHECK_EQUAL(waitpid(child.pid, NULL, WUNTRACED), child.pid);
	client = ask(host, port);
	readable.fd = client.channel->fd;
	CHECK_EQUAL(poll(&readable, 1, 100), 0);
	side_close(&client); /* in the middle of it */
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	finish(&child, SIGKILL);
}

/* ---- fork with connections open ------------------------------------------------------------ */

/* The child has nothing of them: they work on in the parent, end with the parent, and what the
 * child inherited it can only forget; but it can begin anew. */
static inline void fork_in_between(void)
{
	struct connection it = connected();
	struct side waiting = side_with_id();
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0) {
		limit_seconds(30);
		CHECK_EQUAL(rdma->rdma_destroy_id(waiting.id), 0);
		side_close(&it.listener);
		it = connected();
		send_message(&it.client, &it.server, 0x77);
		connection_close(&it);
		_exit(0);
	}
	CHECK_EQUAL(waitpid(pid, &status, 0), pid);
	CHECK_EQUAL(status, 0);
	send_message(&it.client, &it.server, 0x78);
	side_drop(&it.server);
	expect_status(it.client.channel, RDMA_CM_EVENT_DISCONNECTED, it.client.id, 0);
	connection_close(&it);
	side_close(&waiting);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(echo_between_processes());
	before = resources();
	STEP(killed(TAKES));
	STEP(killed(ACCEPTS));
	STEP(killed(ASKS));
	STEP(killed(CONNECTS));
	STEP(server_stopped());
#ifndef __SANITIZE_THREAD__ /* which cannot follow into the child */
	if (!on_system)
		STEP(fork_in_between());
#endif
	expect_resources(before);
	return 0;
}
