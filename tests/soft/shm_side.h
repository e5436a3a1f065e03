/* Ways between neighbours, without links above them: this stands in for handshake.c (the linker is told
 * so: see meson.build), which accepts or refuses what is asked for. */
#ifndef AIORDMA_TESTS_NEIGHBOUR_SIDE_H
#define AIORDMA_TESTS_NEIGHBOUR_SIDE_H

#include <sys/eventfd.h>
#include <sys/uio.h>

#include "shm/shm.h"
#include "objects/objects.h"
#include "verbs_side.h"

enum {
	REFUSE_ME = 99,
	HOLD_ME
};

/* One end of a way, and what it has been told. */
struct end {
	struct soft_way way;
	bool accepted;
	uint8_t greeting[SOFT_GREETING];
	bool gone;
	int error;
	uint64_t records;
	uint64_t bytes; /* taken in; each byte is checked: see pattern */
	uint64_t sent;
	uint64_t to_send; /* whenever there is room */
	uint32_t most; /* in one record */
	bool echo; /* answer each record with one byte */
	int told; /* an eventfd: anything has happened */
};

static struct end *callee; /* who is called next */
static uint32_t held_peer, uncalled_peer;
static unsigned refused, uncalled_all;

static inline uint8_t pattern(uint64_t at)
{
	return (uint8_t)(at * 31 + (at >> 9));
}

static inline void tell_end(struct end *end)
{
	const uint64_t one = 1;

	CHECK_EQUAL(write(end->told, &one, sizeof(one)), sizeof(one));
}

static inline void send_more(struct end *end)
{
	static uint8_t bytes[SOFT_WAY_LEAST];

	while (end->sent < end->to_send) {
		uint32_t length = end->most;
		size_t room = soft_way_room(&end->way, length);

		if (!room)
			return;
		if (length > end->to_send - end->sent)
			length = (uint32_t)(end->to_send - end->sent);
		for (uint32_t i = 0; i < length; i++)
			bytes[i] = pattern(end->sent + i);
		/* In two pieces. */
		struct iovec iov[2] = {{bytes, length / 2},
				       {bytes + length / 2, length - length / 2}};

		soft_way_write(&end->way, iov, 2, length);
		end->sent += length;
	}
}

static inline void end_accepted(struct soft_way *way, const uint8_t *greeting)
{
	struct end *end = soft_container(way, struct end, way);

	CHECK(!end->accepted);
	end->accepted = true;
	memcpy(end->greeting, greeting, SOFT_GREETING);
	send_more(end);
	tell_end(end);
}

static inline void end_data(struct soft_way *way, const uint8_t *bytes, size_t length)
{
	struct end *end = soft_container(way, struct end, way);

	for (size_t i = 0; i < length; i++)
		CHECK_EQUAL(bytes[i], pattern(end->bytes + i));
	end->bytes += length;
	end->records++;
	if (end->echo) {
		end->to_send++;
		send_more(end);
	}
	tell_end(end);
}

static inline void end_writable(struct soft_way *way)
{
	struct end *end = soft_container(way, struct end, way);

	send_more(end);
	tell_end(end);
}

static inline void end_gone(struct soft_way *way, int error)
{
	struct end *end = soft_container(way, struct end, way);

	CHECK(!end->gone);
	CHECK(!way->neighbour);
	end->gone = true;
	end->error = error;
	tell_end(end);
}

static const struct soft_way_calls end_calls = {
	.accepted = end_accepted,
	.data = end_data,
	.writable = end_writable,
	.gone = end_gone,
};

void __wrap_soft_greeting_called(struct soft_neighbour *neighbour, uint32_t peer,
				 const uint8_t greeting[SOFT_GREETING]);
void __wrap_soft_greeting_uncalled(struct soft_neighbour *neighbour, uint32_t peer);

void __wrap_soft_greeting_called(struct soft_neighbour *neighbour, uint32_t peer,
				 const uint8_t greeting[SOFT_GREETING])
{
	struct end *end = callee;
	uint8_t answer[SOFT_GREETING];

	if (greeting[0] == HOLD_ME) {
		held_peer = peer;
		return;
	}
	if (!end || greeting[0] == REFUSE_ME) {
		refused++;
		soft_neighbour_refuse(neighbour, peer);
		return;
	}
	callee = NULL;
	memcpy(end->greeting, greeting, SOFT_GREETING);
	memset(answer, greeting[0] + 1, sizeof(answer));
	CHECK_EQUAL(soft_way_accept(&end->way, neighbour, peer, answer), 0);
	end->accepted = true;
	send_more(end);
	tell_end(end);
}

void __wrap_soft_greeting_uncalled(struct soft_neighbour *neighbour, uint32_t peer)
{
	(void)neighbour;
	uncalled_peer = peer;
	uncalled_all += peer == 0;
}

/* ---- the tests' side ----------------------------------------------------------------------- */

static inline void end_init(struct end *end)
{
	*end = (struct end){
		.way.calls = &end_calls,
		.most = 1000,
		.told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
	};
	CHECK(end->told >= 0);
}

static inline void end_done(struct end *end)
{
	soft_lock();
	soft_way_end(&end->way);
	soft_unlock();
	close(end->told);
}

static inline void call_next(struct end *end)
{
	soft_lock();
	callee = end;
	soft_unlock();
}

static inline uint16_t own_lid(void)
{
	soft_lock();
	uint16_t lid = soft_listener_port();

	soft_unlock();
	CHECK(lid);
	return lid;
}

static inline int open_to(struct end *end, uint16_t lid, uint8_t byte)
{
	uint8_t greeting[SOFT_GREETING];
	int rc = EHOSTUNREACH;

	memset(greeting, byte, sizeof(greeting));
	soft_lock();
	struct soft_neighbour *neighbour = soft_neighbour_at(lid);

	if (neighbour)
		rc = soft_way_open(&end->way, neighbour, greeting);
	soft_unlock();
	return rc;
}

/* Until it is so, which is looked at under the lock: by doing the device's work, or asleep until
 * something was told while the device's thread does it. */
#define UNTIL(end, polling, condition)                                                             \
	for (;;) {                                                                                 \
		uint64_t count_;                                                                   \
		soft_lock();                                                                       \
		bool is_so_ = (condition);                                                         \
		soft_unlock();                                                                     \
		if (is_so_)                                                                        \
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

#endif
