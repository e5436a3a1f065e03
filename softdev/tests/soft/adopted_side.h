/* A queue pair whose peer is the test itself. The test holds the other end of the stream and can
 * send anything. */
#pragma once

#include "record_side.h"
#include "verbs_side.h"

#include "objects/objects.h"
#include "link/link.h"

enum { PEER_PSN = 100 };

/* The peer's address, for use until the queue pair has a stream. */
static const struct address absent = {.psn = PEER_PSN, .qpn = 77};

/* Give the queue pair one end of a stream. Its send buffer has `buffer` bytes, or the default size
 * if `buffer` is 0. Returns the other end. */
static inline int adopt_stream(struct side *side, int buffer)
{
	int fds[2];

	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	CHECK_OK(fcntl(fds[1], F_SETFL, O_NONBLOCK));
	if (buffer)
		CHECK_OK(setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer)));
	CHECK_OK(LOCKED(soft_qp_adopt(soft_qp_of(side->qp), fds[1], NULL, 0)));
	record_left[fds[0]] = 0;
	return fds[0];
}

static inline int adopt_narrow(struct side *side, int buffer)
{
	bring_up(side, &absent);
	return adopt_stream(side, buffer);
}

static inline int adopt(struct side *side)
{
	return adopt_narrow(side, 0);
}

/* Send a frame. A NULL payload sends zeros. A payload of more than 4096 bytes is omitted. */
static inline void send_stream_frame(int fd, struct soft_frame frame, const void *payload)
{
	uint8_t bytes[SOFT_FRAME_HEADER + 4096] = {0};
	size_t length = frame.length <= 4096 ? frame.length : 0;

	soft_frame_encode(bytes, &frame);
	if (payload)
		memcpy(bytes + SOFT_FRAME_HEADER, payload, length);
	send_record_bytes(fd, bytes, SOFT_FRAME_HEADER + length);
}

static inline struct soft_frame receive_stream_frame(int fd, uint8_t *payload, size_t room)
{
	struct soft_frame frame = receive_frame_header(fd);

	CHECK(frame.length <= room);
	CHECK(receive_record_bytes(fd, payload, frame.length));
	return frame;
}

static inline void wait_for_state(struct side *side, enum ibv_qp_state state)
{
	while (state_of(side) != state)
		soft_progress();
}
