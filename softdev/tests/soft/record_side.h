/* The other end of an adopted stream, which the test plays with frames in records
 * (path/tcp/path.c). */
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cm_check.h"

#include "path/path.h"

enum {
	RECORD_HEADER = 12,
	STREAM_CHAN = 1, /* number of the only channel at both ends */
};

static inline void record_header(uint8_t *at, enum soft_record_kind kind, uint32_t length,
				 uint32_t to, uint32_t from)
{
	soft_put32(at, (uint32_t)kind << 24 | length);
	soft_put32(at + 4, to);
	soft_put32(at + 8, from);
}

/* Send frames of `length` bytes as one record, but without the last `missing` bytes. */
static inline void send_split_record(int fd, const void *frames, size_t length, size_t missing)
{
	uint8_t bytes[RECORD_HEADER + 8192];

	CHECK(length <= sizeof(bytes) - RECORD_HEADER);
	record_header(bytes, SOFT_RECORD_DATA, (uint32_t)length, STREAM_CHAN, 0);
	memcpy(bytes + RECORD_HEADER, frames, length);
	length += RECORD_HEADER - missing;
	CHECK_EQUAL(send(fd, bytes, length, MSG_NOSIGNAL), length);
}

static inline void send_record_bytes(int fd, const void *frames, size_t length)
{
	send_split_record(fd, frames, length, 0);
}

static inline bool receive_exactly(int fd, void *bytes, size_t length)
{
	struct pollfd wait = {.fd = fd, .events = POLLIN};

	while (length) {
		CHECK_EQUAL(poll(&wait, 1, -1), 1);
		ssize_t n = recv(fd, bytes, length, 0);

		if (n <= 0)
			return false;
		bytes = (uint8_t *)bytes + n;
		length -= (size_t)n;
	}
	return true;
}

static uint32_t record_left[1024]; /* unread bytes of the current record, by descriptor */

/* Read the next `length` bytes of frames, which may span several records. Returns false if the
 * channel or the stream has ended. */
static inline bool receive_record_bytes(int fd, void *bytes, size_t length)
{
	uint8_t header[RECORD_HEADER];

	CHECK(fd < 1024);
	while (length) {
		uint32_t part = record_left[fd] < length ? record_left[fd] : (uint32_t)length;

		if (!part) {
			if (!receive_exactly(fd, header, sizeof(header)))
				return false;
			if (header[3] == SOFT_RECORD_END)
				return false;
			CHECK_EQUAL(header[3], SOFT_RECORD_DATA);
			CHECK_EQUAL(soft_get32(header + 4), STREAM_CHAN);
			record_left[fd] = soft_get32(header) & 0xffffff;
			continue;
		}
		if (!receive_exactly(fd, bytes, part))
			return false;
		record_left[fd] -= part;
		bytes = (uint8_t *)bytes + part;
		length -= part;
	}
	return true;
}

static inline struct soft_frame receive_frame_header(int fd)
{
	uint8_t header[SOFT_FRAME_HEADER];
	struct soft_frame frame;

	CHECK(receive_record_bytes(fd, header, sizeof(header)));
	CHECK(soft_frame_decode(header, &frame));
	return frame;
}

/* Expect the end of the channel and then the end of the stream. */
static inline void expect_record_end(int fd)
{
	uint8_t byte;

	CHECK(!receive_record_bytes(fd, &byte, 1));
	CHECK(recv(fd, &byte, 1, MSG_WAITALL) <= 0);
}

static inline void close_records(int fd)
{
	record_left[fd] = 0;
	close(fd);
}
