/* Which notify fds an event loop watches itself, and that the others wake it all the same.
 *
 * With the engine's lock, so that no thread empties a pipe before the test has looked. */
#include <sys/resource.h>

#include "shm/notify_pipe.h"
#include "engine/engine_internal.h"
#include "objects/objects.h"
#include "verbs_side.h"

enum {
	MANY = AIORDMA_NOTIFY_FDS + 2
};

/* What a loop watches. */
struct loop {
	struct ibv_comp_channel *channel;
	int flat[2];
	int notify_fds[AIORDMA_NOTIFY_FDS];
	int count;
	unsigned change; /* that it knows of */
};

/* A notify pipe, and the other process that writes to it. */
struct pair {
	struct soft_notify_pipe writer, reader;
};

static void drain(struct soft_fd_watch *watch, uint32_t events)
{
	(void)events;
	soft_notify_pipe_drain(soft_container(watch, struct soft_notify_pipe, in.watch));
}

static void open_pipes(struct pair *pair)
{
	soft_notify_pipe_init(&pair->writer, NULL);
	soft_notify_pipe_init(&pair->reader, drain);
	CHECK_EQUAL(soft_notify_pipe_make(&pair->writer), 0);
	soft_lock();
	CHECK(soft_notify_pipe_receive(&pair->reader, dup(pair->writer.read_fd)));
	soft_unlock();
}

static void take_down(struct pair *pair)
{
	soft_lock();
	soft_notify_pipe_close(&pair->reader);
	soft_notify_pipe_close(&pair->writer);
	soft_unlock();
}

static bool readable(int fd)
{
	struct pollfd ready = {.fd = fd, .events = POLLIN};

	return poll(&ready, 1, 0) == 1;
}

/* Not before the lock is given back, or the pipe is about to be closed: here at once. */
static void notify(struct pair *pair)
{
	soft_notify_pipe_notify(&pair->writer);
	soft_notify_finish();
}

static struct loop loop_of(struct ibv_context *context)
{
	struct loop loop = {.channel = verbs->ibv_create_comp_channel(context)};

	CHECK(loop.channel);
	CHECK_EQUAL(aiordma_set_nonblocking(verbs, loop.channel->fd), 0);
	CHECK_EQUAL(soft_watch_fds(loop.channel->fd, loop.flat), 2);
	return loop;
}

static void forget(struct loop *loop)
{
	while (loop->count)
		close(loop->notify_fds[--loop->count]);
}

static void ask(struct loop *loop)
{
	forget(loop);
	loop->count = soft_notify_fds(loop->channel->fd, loop->notify_fds, &loop->change);
	CHECK_EQUAL(loop->change, soft_notify_version());
}

static void end(struct loop *loop)
{
	forget(loop);
	CHECK_EQUAL(verbs->ibv_destroy_comp_channel(loop->channel), 0);
}

/* It wakes the loop by its own descriptor with that number, or (-1) by the set. */
static void wakes(struct pair *pair, const struct loop *loop, int number)
{
	soft_lock();
	notify(pair);
	CHECK(readable(soft_engine_epoll_fd())); /* the engine's thread, always */
	CHECK_EQUAL(readable(loop->flat[0]), number < 0);
	for (int i = 0; i < loop->count; i++)
		CHECK_EQUAL(readable(loop->notify_fds[i]), i == number);
	CHECK(soft_notify_pipe_drain(&pair->reader));
	CHECK(!readable(loop->flat[0]));
	soft_unlock();
}

static void comes_and_goes(struct ibv_context *context)
{
	struct loop loop = loop_of(context);
	struct pair first, second;

	ask(&loop);
	CHECK_EQUAL(loop.count, 0);
	open_pipes(&first);
	CHECK(soft_notify_version() != loop.change);
	wakes(&first, &loop, -1); /* it does not know yet */
	ask(&loop);
	CHECK_EQUAL(loop.count, 1);
	wakes(&first, &loop, 0);
	open_pipes(&second);
	wakes(&second, &loop, -1);
	ask(&loop);
	CHECK_EQUAL(loop.count, 2);
	wakes(&first, &loop, 0);
	wakes(&second, &loop, 1);
	/* The loop's own descriptor stays open, and tells of the end. */
	take_down(&first);
	CHECK(soft_notify_version() != loop.change);
	CHECK(readable(loop.notify_fds[0]));
	ask(&loop);
	CHECK_EQUAL(loop.count, 1);
	wakes(&second, &loop, 0);
	take_down(&second);
	end(&loop);
}

/* All of them must know, before the set that they have in common goes without it. */
static void several_loops(struct ibv_context *context)
{
	struct loop one = loop_of(context), other;
	struct pair pair;

	open_pipes(&pair);
	ask(&one);
	wakes(&pair, &one, 0);
	other = loop_of(context);
	soft_lock();
	notify(&pair);
	CHECK(readable(other.flat[0]));
	CHECK(soft_notify_pipe_drain(&pair.reader));
	soft_unlock();
	CHECK(soft_notify_version() != one.change);
	ask(&one);
	soft_lock();
	notify(&pair);
	CHECK(readable(other.flat[0]));
	CHECK(soft_notify_pipe_drain(&pair.reader));
	soft_unlock();
	ask(&other);
	wakes(&pair, &one, 0);
	wakes(&pair, &other, 0);
	/* One that never asks, and goes. */
	struct loop third = loop_of(context);

	ask(&one);
	ask(&other);
	end(&third);
	wakes(&pair, &one, 0);
	take_down(&pair);
	end(&one);
	end(&other);
}

/* A loop that does not watch them has the channel's own fd, which shows all that the device has. */
static void by_the_channel_alone(struct ibv_context *context)
{
	struct ibv_comp_channel *channel = verbs->ibv_create_comp_channel(context);
	struct loop loop = loop_of(context);
	int fds[AIORDMA_NOTIFY_FDS];
	struct pair pair;
	unsigned change;

	CHECK_EQUAL(aiordma_set_nonblocking(verbs, channel->fd), 0);
	open_pipes(&pair);
	ask(&loop);
	CHECK_EQUAL(soft_notify_fds(channel->fd, fds, &change), 0);
	CHECK_EQUAL(change, soft_notify_version());
	soft_lock();
	notify(&pair);
	CHECK(readable(channel->fd));
	CHECK(!readable(loop.channel->fd));
	CHECK(readable(loop.notify_fds[0]));
	CHECK(soft_notify_pipe_drain(&pair.reader));
	soft_unlock();
	take_down(&pair);
	end(&loop);
	CHECK_EQUAL(verbs->ibv_destroy_comp_channel(channel), 0);
}

static void many(struct ibv_context *context)
{
	struct loop loop = loop_of(context);
	struct pair pairs[MANY];

	for (int i = 0; i < MANY; i++)
		open_pipes(&pairs[i]);
	ask(&loop);
	CHECK_EQUAL(loop.count, AIORDMA_NOTIFY_FDS);
	for (int i = 0; i < MANY; i++)
		wakes(&pairs[i], &loop, i < AIORDMA_NOTIFY_FDS ? i : -1);
	take_down(&pairs[0]);
	ask(&loop);
	for (int i = 1; i < MANY; i++)
		wakes(&pairs[i], &loop, i <= AIORDMA_NOTIFY_FDS ? i - 1 : -1);
	for (int i = 1; i < MANY; i++)
		take_down(&pairs[i]);
	end(&loop);
}

/* A pipe that is not watched wakes no loop. */
static void port_down(struct ibv_context *context)
{
	struct loop loop = loop_of(context);
	struct pair pair;

	open_pipes(&pair);
	ask(&loop);
	soft_lock();
	soft_watches_silence(true);
	soft_unlock();
	CHECK(soft_notify_version() != loop.change);
	ask(&loop);
	CHECK_EQUAL(loop.count, 0);
	soft_lock();
	notify(&pair);
	CHECK(!readable(loop.flat[0]));
	soft_watches_silence(false);
	CHECK(readable(loop.flat[0]));
	CHECK(soft_notify_pipe_drain(&pair.reader));
	soft_unlock();
	CHECK(soft_notify_version() != loop.change);
	ask(&loop);
	wakes(&pair, &loop, 0);
	take_down(&pair);
	end(&loop);
}

static void no_descriptors(struct ibv_context *context)
{
	struct loop loop = loop_of(context);
	struct rlimit before, none;
	struct pair pairs[2];

	open_pipes(&pairs[0]);
	open_pipes(&pairs[1]);
	int next = dup(0);

	close(next);
	CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = (struct rlimit){.rlim_cur = (rlim_t)next + 1, .rlim_max = before.rlim_max};
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &none), 0);
	ask(&loop);
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &before), 0);
	CHECK_EQUAL(loop.count, 0);
	int fd = dup(0);

	CHECK_EQUAL(fd, next); /* the one that there was room for has been closed */
	close(fd);
	wakes(&pairs[0], &loop, -1);
	wakes(&pairs[1], &loop, -1);
	take_down(&pairs[0]);
	take_down(&pairs[1]);
	end(&loop);
}

/* More pipes than are kept for later: each shows one byte in the end, and none is written while the
 * lock is held that need not be. */
static void after_the_lock(void)
{
	enum {
		PIPES = SOFT_NOTIFY_MOST + 2
	};
	struct soft_notify_pipe pipes[PIPES];

	for (int i = 0; i < PIPES; i++) {
		soft_notify_pipe_init(&pipes[i], NULL);
		CHECK_EQUAL(soft_notify_pipe_make(&pipes[i]), 0);
	}
	soft_lock();
	for (int i = 0; i < PIPES; i++) {
		soft_notify_pipe_notify(&pipes[i]);
		CHECK_EQUAL(readable(pipes[i].read_fd), i >= SOFT_NOTIFY_MOST);
	}
	soft_unlock();
	for (int i = 0; i < PIPES; i++) {
		char bytes[2];

		CHECK_EQUAL(read(pipes[i].read_fd, bytes, sizeof(bytes)), 1);
	}
	/* Nothing is written to what has its number after it was closed. */
	int number = pipes[0].write_fd, ends[2];

	CHECK_EQUAL(pipe(ends), 0);
	soft_lock();
	soft_notify_pipe_notify(&pipes[0]);
	for (int i = 0; i < PIPES; i++)
		soft_notify_pipe_close(&pipes[i]);
	CHECK_EQUAL(dup2(ends[1], number), number);
	soft_unlock();
	CHECK(!readable(ends[0]));
	close(number);
	close(ends[0]);
	close(ends[1]);
}

int main(void)
{
	struct ibv_context *context = open_device();

	comes_and_goes(context);
	several_loops(context);
	by_the_channel_alone(context);
	many(context);
	port_down(context);
	no_descriptors(context);
	after_the_lock();
	CHECK_EQUAL(verbs->ibv_close_device(context), 0);
	return 0;
}
