/* Connections between processes: what one side learns when the other is killed or stopped. */
#include "cm_silent_end.h"

#include <signal.h>
#include <sys/prctl.h>

/* How far a child comes. */
enum stage {
	LISTENS,
	TAKES, /* a request, and does nothing more */
	ACCEPTS,
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

/* A killed process' kernel ends its streams: it is learned at once, and not as an orderly end. */
static void broken(struct side *side)
{
	struct rdma_cm_event *event = expect(side->channel, RDMA_CM_EVENT_DISCONNECTED, side->id);

	CHECK(event->status < 0);
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

int main(void)
{
	int before;

	cm_begin(100);
	STEP(killed(TAKES));
	before = resources();
	STEP(killed(ACCEPTS));
	STEP(killed(ASKS));
	STEP(killed(CONNECTS));
	STEP(server_stopped());
	expect_resources(before);
	return 0;
}
