/* Connections between processes: an echo, and what one side learns when the other is killed. */
#include "cm_silent_end.h"

#include <signal.h>
#include <sys/prctl.h>

/* A child that runs `body` with the pipe ends; nothing of the device is there before the fork. */
struct child {
	pid_t pid;
	int from, to;
};

static struct child start(void (*body)(int from_parent, int to_parent))
{
	struct child child;
	int down[2], up[2];

	CHECK_EQUAL(pipe(down), 0);
	CHECK_EQUAL(pipe(up), 0);
	child.pid = fork();
	CHECK(child.pid >= 0);
	if (child.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		limit_seconds(60);
		close(down[1]);
		close(up[0]);
		body(down[0], up[1]);
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

static void until_told(int fd)
{
	uint8_t byte;

	while (read(fd, &byte, 1) > 0)
		;
}

static struct ibv_wc receive(struct side *side)
{
	struct ibv_wc wc = side_completion(side);

	CHECK_EQUAL(wc.wr_id, 2);
	return wc;
}

static void send_only(struct side *side)
{
	struct ibv_sge sge = {(uintptr_t)side->buffer, MESSAGE, side->mr->lkey};
	struct ibv_send_wr send = {.wr_id = 1,
				   .sg_list = &sge,
				   .num_sge = 1,
				   .opcode = IBV_WR_SEND,
				   .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad;

	CHECK_EQUAL(side->id->verbs->ops.post_send(side->id->qp, &send, &bad), 0);
}

/* ---- children ------------------------------------------------------------------------------ */

/* Accepts one connection, answers what comes with the same, until the other side ends it. */
static void echo(int from_parent, int to_parent)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct ibv_wc wc;

	(void)from_parent;
	say(to_parent, port_of(listener.id));
	server = take_request(&listener);
	accept_side(&server);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	CHECK_EQUAL(receive(&server).status, IBV_WC_SUCCESS);
	memcpy(server.buffer, server.buffer + MESSAGE, MESSAGE);
	side_post_receive(&server);
	send_only(&server);
	wc = side_completion(&server);
	CHECK_EQUAL(wc.wr_id, 1);
	CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
	expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	CHECK_EQUAL(receive(&server).status, IBV_WC_WR_FLUSH_ERR);
	side_drop(&server);
	side_close(&listener);
}

/* Takes a request and does nothing more. */
static void take_only(int from_parent, int to_parent)
{
	struct side listener = listen_at(host, 0);

	say(to_parent, port_of(listener.id));
	take_request(&listener);
	say(to_parent, 1);
	until_told(from_parent);
}

static void accept_only(int from_parent, int to_parent)
{
	struct side listener = listen_at(host, 0);
	struct side server;

	say(to_parent, port_of(listener.id));
	server = take_request(&listener);
	accept_side(&server);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	say(to_parent, 1);
	until_told(from_parent);
}

static void listen_only(int from_parent, int to_parent)
{
	struct side listener = listen_at(host, 0);

	say(to_parent, port_of(listener.id));
	until_told(from_parent);
}

static void connect_only(int from_parent, int to_parent)
{
	struct side client = ask(host, hear(from_parent));

	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	say(to_parent, 1);
	until_told(from_parent);
}

static void ask_only(int from_parent, int to_parent)
{
	ask(host, hear(from_parent));
	say(to_parent, 1);
	until_told(from_parent);
}

/* ---- tests --------------------------------------------------------------------------------- */

static void echo_between_processes(void)
{
	struct child child = start(echo);
	struct side client = ask(host, hear(child.from));
	struct ibv_wc wc;

	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	memset(client.buffer, 0x7e, MESSAGE);
	send_only(&client);
	for (int i = 0; i < 2; i++) {
		wc = side_completion(&client);
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
	CHECK_EQUAL(receive(side).status, IBV_WC_WR_FLUSH_ERR);
}

static void server_killed(void)
{
	struct child child = start(accept_only);
	struct side client = ask(host, hear(child.from));

	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	hear(child.from);
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	broken(&client);
	side_close(&client);
	finish(&child, SIGKILL);
}

static void client_killed(void)
{
	struct child child = start(connect_only);
	struct side listener = listen_at(host, 0);
	struct side server;

	say(child.to, port_of(listener.id));
	server = take_request(&listener);
	accept_side(&server);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	hear(child.from);
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	broken(&server);
	side_drop(&server);
	side_close(&listener);
	finish(&child, SIGKILL);
}

/* Before it has answered; the real CM says "rejected by the consumer" in the dead one's name. */
static void server_killed_before_answering(void)
{
	struct child child = start(take_only);
	struct side client = ask(host, hear(child.from));

	hear(child.from);
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	if (on_system)
		expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	else
		expect_status(client.channel, RDMA_CM_EVENT_CONNECT_ERROR, client.id, -ECONNRESET);
	side_close(&client);
	finish(&child, SIGKILL);
}

static void client_killed_before_answer(void)
{
	struct child child = start(ask_only);
	struct side listener = listen_at(host, 0);
	struct side server;

	say(child.to, port_of(listener.id));
	server = take_request(&listener);
	hear(child.from);
	CHECK_EQUAL(kill(child.pid, SIGKILL), 0);
	finish(&child, SIGKILL);
	expect_silent_end(&listener, &server);
	side_close(&listener);
}

/* Stopped, not dead: its kernel takes the connection, its connection manager does not answer; the
 * application gives up when it likes. */
static void server_stopped(void)
{
	struct child child = start(listen_only);
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
	struct side listener = listen_at(host, 0);
	struct side client, server, waiting = side_with_id();
	int status;
	pid_t pid;

	connect_sides(&listener, host, &client, &server);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		limit_seconds(30);
		CHECK_EQUAL(rdma->rdma_destroy_id(waiting.id), 0);
		CHECK_EQUAL(rdma->rdma_destroy_id(listener.id), 0);
		rdma->rdma_destroy_event_channel(listener.channel);
		listener = listen_at(host, 0);
		connect_sides(&listener, host, &client, &server);
		send_message(&client, &server, 0x77);
		side_drop(&server);
		side_close(&client);
		side_close(&listener);
		_exit(0);
	}
	CHECK_EQUAL(waitpid(pid, &status, 0), pid);
	CHECK_EQUAL(status, 0);
	send_message(&client, &server, 0x78);
	side_drop(&server);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	side_close(&client);
	side_close(&waiting);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(echo_between_processes());
	before = resources();
	STEP(server_killed());
	STEP(client_killed());
	STEP(server_killed_before_answering());
	STEP(client_killed_before_answer());
	STEP(server_stopped());
#ifndef __SANITIZE_THREAD__ /* which cannot follow into the child */
	if (!on_system)
		STEP(fork_in_between());
#endif
	expect_resources(before);
	return 0;
}
