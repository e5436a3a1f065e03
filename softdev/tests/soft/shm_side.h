/* Channels between local peers, without links above them. The linker replaces handshake.c with
 * functions of this file (--wrap in meson.build), which accept or refuse a channel as requested. */
#pragma once

#include <sys/eventfd.h>
#include <sys/uio.h>

#include "link/link.h"
#include "objects/objects.h"
#include "verbs_side.h"

enum { REFUSE_ME = 99, HOLD_ME };

/* One end of a channel, with the events reported to it. */
struct end {
	struct soft_chan chan;
	bool accepted;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];
	bool gone;
	int error;
	uint64_t records;
	uint64_t bytes; /* bytes received, each compared with `pattern` */
	uint64_t sent;
	uint64_t to_send; /* total bytes to send, as room permits */
	uint32_t most; /* maximum bytes in one record */
	bool echo; /* answer each record with one byte */
	int told; /* eventfd signaled after each event */
};

static struct end *callee; /* the end that accepts next */
static uint32_t held_id, withdrawn_id;
static unsigned refused, withdrawn_all;

static inline uint8_t pattern(uint64_t at)
{
	return (uint8_t)(at * 31 + (at >> 9));
}

static inline void notify_end(struct end *end)
{
	const uint64_t one = 1;

	CHECK_EQUAL(write(end->told, &one, sizeof(one)), sizeof(one));
}

static inline void send_more(struct end *end)
{
	static uint8_t bytes[SOFT_CHAN_MIN_ROOM];

	while (end->sent < end->to_send) {
		uint32_t length = end->most;
		size_t room = soft_chan_room(&end->chan, length);

		if (!room)
			return;
		if (length > end->to_send - end->sent)
			length = (uint32_t)(end->to_send - end->sent);
		for (uint32_t i = 0; i < length; i++)
			bytes[i] = pattern(end->sent + i);
		struct iovec iov[2] = {{bytes, length / 2},
				       {bytes + length / 2, length - length / 2}};

		soft_chan_write(&end->chan, iov,
				&(struct soft_record_end){.iovecs = 2, .bytes = length}, 1);
		end->sent += length;
	}
}

static inline void end_accepted(struct soft_chan *chan, const uint8_t *handshake)
{
	struct end *end = soft_container(chan, struct end, chan);

	CHECK(!end->accepted);
	end->accepted = true;
	memcpy(end->handshake, handshake, SOFT_HANDSHAKE_SIZE);
	send_more(end);
	notify_end(end);
}

static inline void end_data(struct soft_chan *chan, const uint8_t *bytes, size_t length,
			    size_t rest)
{
	struct end *end = soft_container(chan, struct end, chan);

	CHECK_EQUAL(rest, 0);
	for (size_t i = 0; i < length; i++)
		CHECK_EQUAL(bytes[i], pattern(end->bytes + i));
	end->bytes += length;
	end->records++;
	if (end->echo) {
		end->to_send++;
		send_more(end);
	}
	notify_end(end);
}

static inline void end_writable(struct soft_chan *chan)
{
	struct end *end = soft_container(chan, struct end, chan);

	send_more(end);
	notify_end(end);
}

static inline void end_exited(struct soft_chan *chan, uint64_t missing)
{
	(void)chan;
	CHECK_EQUAL(missing, 0);
}

static inline void end_closed(struct soft_chan *chan, int error)
{
	struct end *end = soft_container(chan, struct end, chan);

	CHECK(!end->gone);
	CHECK(!chan->path);
	end->gone = true;
	end->error = error;
	notify_end(end);
}

static const struct soft_chan_ops end_calls = {
	.accepted = end_accepted,
	.data = end_data,
	.writable = end_writable,
	.peer_exited = end_exited,
	.closed = end_closed,
};

__typeof__(soft_handshake_requested) __wrap_soft_handshake_requested;
__typeof__(soft_handshake_withdrawn) __wrap_soft_handshake_withdrawn;

void __wrap_soft_handshake_requested(struct soft_path *path, uint32_t remote_id,
				     const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	struct end *end = callee;
	uint8_t answer[SOFT_HANDSHAKE_SIZE];

	if (handshake[0] == HOLD_ME) {
		held_id = remote_id;
		return;
	}
	if (!end || handshake[0] == REFUSE_ME) {
		refused++;
		soft_path_refuse(path, remote_id);
		return;
	}
	callee = NULL;
	memcpy(end->handshake, handshake, SOFT_HANDSHAKE_SIZE);
	memset(answer, handshake[0] + 1, sizeof(answer));
	CHECK_OK(soft_chan_accept(&end->chan, path, remote_id, answer));
	end->accepted = true;
	send_more(end);
	notify_end(end);
}

void __wrap_soft_handshake_withdrawn(struct soft_path *path, uint32_t remote_id)
{
	(void)path;
	withdrawn_id = remote_id;
	withdrawn_all += remote_id == 0;
}

/* ---- the tests' side ----------------------------------------------------------------------- */

static inline void end_init(struct end *end)
{
	*end = (struct end){
		.chan.calls = &end_calls,
		.most = 1000,
		.told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
	};
	CHECK(end->told >= 0);
}

static inline void end_done(struct end *end)
{
	soft_lock();
	soft_chan_end(&end->chan);
	soft_unlock();
	close(end->told);
}

static inline void accept_next(struct end *end)
{
	soft_lock();
	callee = end;
	soft_unlock();
}

static inline uint16_t own_port(void)
{
	uint16_t port = LOCKED(soft_ip_port());

	CHECK(port);
	return port;
}

static inline int open_channel_to(struct end *end, uint16_t port, uint8_t byte)
{
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];
	int rc = EHOSTUNREACH;

	memset(handshake, byte, sizeof(handshake));
	soft_lock();
	struct soft_path *path = soft_shm_path_at(port, 1, 0);

	if (path)
		rc = soft_chan_open(&end->chan, path, handshake);
	soft_unlock();
	return rc;
}

/* Wait for a condition, which is evaluated under the lock. If `polling`, drive the device from this
 * thread. Otherwise, sleep between events and let the device's own thread make progress. */
#define UNTIL(end, polling, condition)                                                             \
	for (;;) {                                                                                 \
		uint64_t count_;                                                                   \
		if (LOCKED(condition))                                                             \
			break;                                                                     \
		if (polling) {                                                                     \
			soft_progress_try();                                                       \
			sched_yield();                                                             \
		} else {                                                                           \
			struct pollfd told_ = {.fd = (end)->told, .events = POLLIN};               \
			CHECK_EQUAL(poll(&told_, 1, -1), 1);                                       \
			(void)!read((end)->told, &count_, sizeof(count_));                         \
		}                                                                                  \
	}

static inline void send_now(struct end *end, uint64_t more)
{
	soft_lock();
	end->to_send += more;
	send_more(end);
	soft_unlock();
}
