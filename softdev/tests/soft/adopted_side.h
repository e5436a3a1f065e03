/* A queue pair whose peer is the test: it has the other end of the stream, and says what it likes. */
#pragma once

#include "record_side.h"
#include "verbs_side.h"

#include "objects/objects.h"
#include "link/link.h"

enum { PEER_PSN = 100 };

/* Bring it up, and give it one end of a stream, whose buffer holds so many bytes; the other one. */
static inline int adopt_narrow(struct side *side, int buffer)
{
	const struct address absent = {.psn = PEER_PSN,
				       .qpn = 77}; /* LID 0: no peer is looked for */
	int fds[2];

	bring_up(side, &absent);
	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	CHECK_OK(fcntl(fds[1], F_SETFL, O_NONBLOCK));
	if (buffer)
		CHECK_OK(setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer)));
	soft_lock();
	CHECK_OK(soft_qp_adopt(soft_qp_of(side->qp), fds[1], NULL, 0));
	soft_unlock();
	record_left[fds[0]] = 0;
	return fds[0];
}

static inline int adopt(struct side *side)
{
	return adopt_narrow(side, 0);
}

/* Zeros for a payload that is NULL. */
static inline void say_frame(int fd, struct soft_frame frame, const void *payload)
{
	uint8_t bytes[SOFT_FRAME_HEADER + 1024] = {0};

	soft_frame_encode(bytes, &frame);
	CHECK(frame.length <= 1024);
	if (payload)
		memcpy(bytes + SOFT_FRAME_HEADER, payload, frame.length);
	say_bytes(fd, bytes, SOFT_FRAME_HEADER + frame.length);
}

static inline struct soft_frame hear_frame(int fd, uint8_t *payload, size_t room)
{
	struct soft_frame frame = hear_header(fd);

	CHECK(frame.length <= room);
	CHECK(hear_bytes(fd, payload, frame.length));
	return frame;
}

static inline void until_state(struct side *side, enum ibv_qp_state state)
{
	while (state_of(side) != state)
		soft_progress();
}
