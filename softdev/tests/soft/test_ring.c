/* Tests of the record ring. They write records at all positions, run a writer and a reader thread
 * that sleep whenever they can, and corrupt the shared memory as a malicious peer might. */
#define _GNU_SOURCE /* memfd_create */
#include "cm_check.h"
#include "path/shm/copy.h"
#include "path/shm/ring.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>

static struct soft_ring_shared shared;
static uint8_t *bytes;
static struct soft_ring writer, reader;

static void map_ring(void)
{
	int fd = memfd_create("ring", MFD_CLOEXEC);

	CHECK(fd >= 0);
	CHECK_OK(ftruncate(fd, SOFT_RING_SIZE));
	CHECK(bytes = soft_ring_map(fd, 0));
	close(fd);
}

static void reset_ring(void)
{
	memset(&shared, 0, sizeof(shared));
	soft_ring_init(&writer, &shared, bytes);
	soft_ring_init(&reader, &shared, bytes);
}

static void put_record(uint32_t kind, uint32_t to, uint32_t from, uint32_t length)
{
	static uint8_t payload[SOFT_MAX_RECORD];
	uint32_t half = length / 2;
	struct iovec iov[2] = {{payload, half}, {payload + half, length - half}};

	memset(payload, (int)(kind + to + length), length);
	soft_ring_put(&writer,
		      &(struct soft_record){.kind = kind, .to = to, .from = from, .length = length},
		      iov, 2);
}

static void expect_record(uint32_t kind, uint32_t to, uint32_t from, uint32_t length)
{
	struct soft_record record;

	CHECK_EQUAL(soft_ring_next(&reader, &record), 1);
	CHECK_EQUAL(record.kind, kind);
	CHECK_EQUAL(record.to, to);
	CHECK_EQUAL(record.from, from);
	CHECK_EQUAL(record.length, length);
	for (uint32_t i = 0; i < length; i++)
		CHECK_EQUAL(record.payload[i], (uint8_t)(kind + to + length));
	soft_ring_release(&reader, &record);
}

static void copy_writes_exactly_the_destination_range(void)
{
	enum { MOST = 70000, BESIDE = 64 };
	static uint8_t from[MOST + BESIDE], to[MOST + 2 * BESIDE];
	static const size_t lengths[] = {0, 1, 63, 64, 65, 130, 4095, 4096, 4097, 32768, MOST};
	bool here = soft_copy_avoids_movsb;

	for (size_t i = 0; i < sizeof(from); i++)
		from[i] = (uint8_t)(1 + i % 251);
	FOR_EACH (i, lengths)
		for (int way = 0; way < 3; way++)
			for (size_t at = 0; at < BESIDE; at += 7) {
				size_t length = lengths[i];

				memset(to, 0, sizeof(to));
				soft_copy_avoids_movsb = way == 1;
				(way == 2 ? soft_copy_by_loads
					  : soft_copy)(to + at, from + BESIDE - at, length);
				CHECK(!memcmp(to + at, from + BESIDE - at, length));
				for (size_t j = 0; j < BESIDE; j++)
					CHECK(!to[at + length + j] && (j >= at || !to[j]));
			}
	soft_copy_avoids_movsb = here;
}

static void expect_empty(void)
{
	struct soft_record record;

	CHECK_EQUAL(soft_ring_next(&reader, &record), 0);
	CHECK(!soft_ring_has_input(&reader));
}

/* The ring reuses its first pages as long as the reader keeps up. */
static void ring_reuses_its_first_pages(void)
{
	uint64_t furthest = 0;

	reset_ring();
	for (int i = 0; i < 20000; i++) {
		put_record(1, 1, 1, 100);
		expect_record(1, 1, 1, 100);
		if ((writer.position & (SOFT_RING_SIZE - 1)) > furthest)
			furthest = writer.position & (SOFT_RING_SIZE - 1);
	}
	CHECK(writer.position > 2 * SOFT_RING_SIZE);
	CHECK(furthest < SOFT_RING_SIZE / 8);
}

static void ring_wastes_no_room_and_reports_requests_once(void)
{
	uint32_t count = 0;

	reset_ring();
	CHECK_EQUAL(soft_ring_room(&writer, 1), SOFT_MAX_RECORD);
	while (soft_ring_room(&writer, 5000) >= 5000) {
		put_record(1, count, 0, 5000);
		count++;
	}
	/* No room is wasted. */
	CHECK((count + 1) * (5000u + 2 * SOFT_RECORD_HEADER) > SOFT_RING_SIZE);
	ssize_t rest = soft_ring_room(&writer, 1);

	CHECK(rest > 0 && rest < 5000);
	put_record(2, 0, 0, (uint32_t)rest);
	CHECK_EQUAL(soft_ring_room(&writer, 1), 0);
	CHECK_EQUAL(soft_ring_request_room(&writer), 0);
	CHECK(!soft_ring_take_notify_request(&writer));
	expect_record(1, 0, 0, 5000);
	CHECK(soft_ring_take_room_request(&reader));
	CHECK(!soft_ring_take_room_request(&reader)); /* reported once */
	CHECK(soft_ring_room(&writer, 1) >= 5000);
	for (uint32_t i = 1; i < count; i++)
		expect_record(1, i, 0, 5000);
	expect_record(2, 0, 0, (uint32_t)rest);
	expect_empty();
}

static void flush_notifies_an_armed_reader_once(void)
{
	reset_ring();
	put_record(1, 1, 1, 1);
	CHECK(!soft_ring_flush(&writer));
	CHECK(soft_ring_arm(&reader)); /* the ring already has input */
	expect_record(1, 1, 1, 1);
	CHECK(soft_ring_is_armed(&reader));
	put_record(1, 1, 1, 1);
	CHECK(soft_ring_flush(&writer));
	CHECK(!soft_ring_flush(&writer)); /* one notification is enough */
	CHECK(!soft_ring_is_armed(&reader));
	expect_record(1, 1, 1, 1);
	CHECK(!soft_ring_arm(&reader));
	soft_ring_disarm(&reader);
	CHECK(!soft_ring_take_notify_request(&writer));
}

/* ---- two threads --------------------------------------------------------------------------- */

enum { RECORDS = 60000 };
static int reader_bell, writer_bell;

static void ring_bell(int fd)
{
	const uint64_t one = 1;

	CHECK_EQUAL(write(fd, &one, sizeof(one)), sizeof(one));
}

static void wait_for_bell(int fd)
{
	uint64_t count;

	CHECK_EQUAL(read(fd, &count, sizeof(count)), sizeof(count));
}

static uint32_t length_of(uint32_t number)
{
	/* Series of short records let the reader catch up and sleep. Long records make the writer
	 * sleep. */
	return number % 1000 < 900 ? number % 64 : number * 2654435761u % 60000;
}

static void *write_records(void *unused)
{
	static uint8_t payload[60000];

	(void)unused;
	for (uint32_t i = 0; i < RECORDS; i++) {
		uint32_t length = length_of(i);
		struct iovec iov = {payload, length};

		while (soft_ring_room(&writer, length) < (ssize_t)length ||
		       soft_ring_room(&writer, length) == 0) {
			ssize_t now = soft_ring_request_room(&writer);

			if (now <= 0 || now < (ssize_t)length)
				wait_for_bell(writer_bell);
		}
		memset(payload, (int)i, length);
		soft_ring_put(&writer, &(struct soft_record){.kind = 1, .to = i, .length = length},
			      &iov, 1);
		if (soft_ring_flush(&writer))
			ring_bell(reader_bell);
	}
	return NULL;
}

static void *read_records(void *unused)
{
	struct soft_record record;

	(void)unused;
	for (uint32_t i = 0; i < RECORDS;) {
		int rc = soft_ring_next(&reader, &record);

		if (rc == 0) {
			if (soft_ring_take_room_request(&reader))
				ring_bell(writer_bell);
			if (!soft_ring_arm(&reader))
				wait_for_bell(reader_bell);
			continue;
		}
		CHECK_EQUAL(rc, 1);
		CHECK_EQUAL(record.to, i);
		CHECK_EQUAL(record.length, length_of(i));
		for (uint32_t at = 0; at < record.length; at += 997)
			CHECK_EQUAL(record.payload[at], (uint8_t)i);
		soft_ring_release(&reader, &record);
		i++;
	}
	return NULL;
}

/* A lost wake-up would leave one or both threads asleep forever. */
static void sleeping_reader_and_writer_are_always_woken(void)
{
	pthread_t a, b;

	reset_ring();
	CHECK((reader_bell = eventfd(0, 0)) >= 0);
	CHECK((writer_bell = eventfd(0, 0)) >= 0);
	CHECK_OK(pthread_create(&a, NULL, write_records, NULL));
	CHECK_OK(pthread_create(&b, NULL, read_records, NULL));
	CHECK_OK(pthread_join(a, NULL));
	CHECK_OK(pthread_join(b, NULL));
	expect_empty();
	close(reader_bell);
	close(writer_bell);
}

/* ---- the other side's nonsense ------------------------------------------------------------- */

/* The reader copies each header only once, so the size of a record cannot change while it is
 * read. */
static void reader_ignores_later_changes_to_shared_memory(void)
{
	struct soft_record record;
	const uint32_t more = 0x10000000;

	reset_ring();
	put_record(1, 1, 1, 64);
	CHECK_EQUAL(soft_ring_next(&reader, &record), 1);
	memcpy(bytes + 12, &more, 4);
	shared.head = 12345;
	soft_ring_release(&reader, &record);
	CHECK_EQUAL(reader.position, 64 + SOFT_RECORD_HEADER);
	CHECK_EQUAL(shared.head, reader.position);
	expect_empty();
	/* The writer never reads its own position from shared memory. */
	shared.tail = 999;
	put_record(2, 1, 1, 64);
	expect_record(2, 1, 1, 64);
	expect_empty();
}

int main(void)
{
	limit_seconds(60);
	map_ring();
	STEP(copy_writes_exactly_the_destination_range());
	STEP(ring_reuses_its_first_pages());
	STEP(ring_wastes_no_room_and_reports_requests_once());
	STEP(flush_notifies_an_armed_reader_once());
	STEP(sleeping_reader_and_writer_are_always_woken());
	STEP(reader_ignores_later_changes_to_shared_memory());
	soft_ring_unmap(bytes);
	return 0;
}
