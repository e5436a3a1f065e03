/* Tests of the RoCE v2 packet format against packets generated with Scapy (tests/roce), and for
 * cases that these packets do not cover. */
#include "path/roce/headers.h"
#include "path/roce/icrc.h"

#include <arpa/inet.h>
#include <endian.h>

#include "cm_check.h"

enum { LONGEST = SOFT_ROCE_HEADERS_MAX + 4096 + SOFT_ROCE_ICRC };

/* The fields of a packet, in the order of the columns in tests/roce/vectors. */
#define FIELDS(X)                                                                                  \
	X(opcode);                                                                                 \
	X(solicited);                                                                              \
	X(migreq);                                                                                 \
	X(fecn);                                                                                   \
	X(becn);                                                                                   \
	X(ack_request);                                                                            \
	X(pkey);                                                                                   \
	X(dest_qpn);                                                                               \
	X(psn);                                                                                    \
	X(qkey);                                                                                   \
	X(src_qpn);                                                                                \
	X(srq);                                                                                    \
	X(flush);                                                                                  \
	X(address);                                                                                \
	X(rkey);                                                                                   \
	X(dma_length);                                                                             \
	X(swap_add);                                                                               \
	X(compare);                                                                                \
	X(syndrome);                                                                               \
	X(msn);                                                                                    \
	X(original);                                                                               \
	X(immediate);                                                                              \
	X(length)

struct vector {
	struct soft_icrc_flow flow;
	uint16_t identification;
	struct soft_roce_packet packet;
	size_t length;
	uint8_t bytes[512];
};

static struct vector vectors[512];
static int vector_count;

/* ---- vectors ------------------------------------------------------------------------------- */

static void parse_address(uint8_t gid[16], const char *text)
{
	memcpy(gid, (const uint8_t[16]){[10] = 0xff, [11] = 0xff}, 16);
	CHECK_EQUAL(strchr(text, ':') ? inet_pton(AF_INET6, text, gid)
				      : inet_pton(AF_INET, text, gid + 12),
		    1);
}

static uint64_t next_number(char **words)
{
	char *end, *word = strsep(words, " ");

	CHECK(word && *word);
	uint64_t value = strtoull(word, &end, 16);

	CHECK(!*end);
	return value;
}

static void read_vector(struct vector *vector, char *words)
{
	struct soft_roce_packet *packet = &vector->packet;
	uint8_t source[16], destination[16];
	uint16_t port;
	char *hex;

	parse_address(source, strsep(&words, " "));
	parse_address(destination, strsep(&words, " "));
	port = (uint16_t)next_number(&words);
	soft_icrc_flow_init(&vector->flow, source, destination, port, SOFT_ROCE_PORT);
	vector->identification = (uint16_t)next_number(&words);
#define READ(name) packet->name = (typeof(packet->name))next_number(&words)
	FIELDS(READ);
	for (hex = words; sscanf(hex, "%2hhx", &vector->bytes[vector->length]) == 1; hex += 2)
		CHECK(++vector->length < sizeof(vector->bytes));
	packet->payload = vector->bytes + vector->length - SOFT_ROCE_ICRC -
			  soft_roce_pad(packet->length) - packet->length;
}

static void read_vectors(void)
{
	FILE *file = fopen("../roce/vectors", "r");
	char line[2048];

	CHECK(file);
	while (fgets(line, sizeof(line), file)) {
		CHECK(vector_count < (int)COUNT_OF(vectors));
		read_vector(&vectors[vector_count++], line);
	}
	fclose(file);
}

static void expect_same_packet(const struct soft_roce_packet *got,
			       const struct soft_roce_packet *expected)
{
#define SAME(name) CHECK_EQUAL(got->name, expected->name)
	FIELDS(SAME);
	CHECK(got->payload == expected->payload);
}

static uint32_t stored_icrc(const uint8_t *bytes, size_t length)
{
	uint32_t icrc;

	memcpy(&icrc, bytes + length - sizeof(icrc), sizeof(icrc));
	return le32toh(icrc);
}

static void check_encode_and_decode(const struct vector *vector)
{
	const struct soft_roce_packet *packet = &vector->packet;
	uint8_t headers[SOFT_ROCE_HEADERS_MAX], zeros[SOFT_ROCE_PAD_MAX] = {0};
	struct iovec pieces[] = {
		{headers, soft_roce_encode(headers, packet)},
		{(void *)packet->payload, packet->length},
		{zeros, soft_roce_pad(packet->length)},
	};
	struct soft_roce_packet got;

	CHECK_EQUAL(soft_roce_decode(&got, vector->bytes, vector->length), SOFT_ROCE_WELL_FORMED);
	expect_same_packet(&got, packet);
	CHECK_EQUAL(pieces[0].iov_len, packet->payload - vector->bytes);
	CHECK(!memcmp(headers, vector->bytes, pieces[0].iov_len));
	CHECK_EQUAL(soft_icrc(&vector->flow, vector->identification, pieces, 3),
		    stored_icrc(vector->bytes, vector->length));
	CHECK(soft_icrc_check(&vector->flow, vector->bytes, vector->length));
}

/* Flip each bit of the packet in turn. The ICRC does not cover the fifth byte, which routers may
 * change. */
static void expect_bit_flips_detected(const struct soft_icrc_flow *flow, uint8_t *bytes,
				      size_t length)
{
	for (size_t bit = 0; bit < 8 * length; bit++) {
		bytes[bit / 8] ^= 1 << bit % 8;
		CHECK_EQUAL(soft_icrc_check(flow, bytes, length), bit / 8 == 4);
		bytes[bit / 8] ^= 1 << bit % 8;
	}
}

/* The check does not know the IPv4 identification, so it accepts an ICRC that is valid for any
 * identification. This is true for one in 65,536 random ICRCs. */
static void random_icrcs_are_rejected(struct vector *vector)
{
	int taken = 0;

	for (int i = 0; i < 1 << 20; i++) {
		uint32_t icrc = next_random();

		memcpy(vector->bytes + vector->length - sizeof(icrc), &icrc, sizeof(icrc));
		taken += soft_icrc_check(&vector->flow, vector->bytes, vector->length);
	}
	CHECK(vector->flow.ipv4 ? taken >= 8 && taken <= 32 : !taken);
}

static void packets_match_the_scapy_vectors(void)
{
	uint32_t lengths[256][2]; /* payload length by opcode and IP version */
	int seen[256] = {0};

	for (int i = 0; i < vector_count; i++) {
		check_encode_and_decode(&vectors[i]);
		expect_bit_flips_detected(&vectors[i].flow, vectors[i].bytes, vectors[i].length);
		seen[vectors[i].packet.opcode] |= vectors[i].flow.ipv4 ? 1 : 2;
		lengths[vectors[i].packet.opcode][vectors[i].flow.ipv4] = vectors[i].packet.length;
	}
	for (int opcode = 0; opcode < 256; opcode++) {
		struct soft_roce_packet packet;
		uint8_t bytes[LONGEST] = {(uint8_t)opcode};
		bool exists = soft_roce_headers((uint8_t)opcode) >= 0;

		CHECK_EQUAL(seen[opcode], exists ? 3 : 0);
		/* If the IPv4 and IPv6 vectors of an opcode have the same payload length, the
		 * opcode has a fixed length. A payload of 4 KiB is then invalid. */
		CHECK_EQUAL(soft_roce_decode(&packet, bytes, sizeof(bytes)),
			    !exists                                    ? SOFT_ROCE_BAD_OPCODE
			    : lengths[opcode][0] == lengths[opcode][1] ? SOFT_ROCE_BAD_PAYLOAD
								       : SOFT_ROCE_WELL_FORMED);
	}
}

/* ---- malformed ----------------------------------------------------------------------------- */

static void malformed_packets_are_rejected(void)
{
	static const struct {
		uint8_t opcode, flags;
		size_t length; /* length of the whole packet */
		enum soft_roce_malformed why;
	} cases[] = {
		{SOFT_ROCE_SEND_ONLY, 0, 16, SOFT_ROCE_WELL_FORMED},
		{SOFT_ROCE_SEND_ONLY, 0, 15, SOFT_ROCE_SHORT},
		{SOFT_ROCE_SEND_ONLY, 0, 0, SOFT_ROCE_SHORT},
		{SOFT_ROCE_SEND_ONLY, 0x01, 16, SOFT_ROCE_BAD_VERSION},
		{SOFT_ROCE_SEND_ONLY, 0x08, 16, SOFT_ROCE_BAD_VERSION},
		{SOFT_ROCE_SEND_ONLY, 0x10, 16, SOFT_ROCE_BAD_PAD},
		{SOFT_ROCE_SEND_ONLY, 0x30, 20, SOFT_ROCE_WELL_FORMED},
		{SOFT_ROCE_SEND_ONLY, 0x20, 22, SOFT_ROCE_BAD_PAD},
		{SOFT_ROCE_SEND_ONLY, 0, 17, SOFT_ROCE_BAD_PAD},
		{SOFT_ROCE_SEND_ONLY_IMMEDIATE, 0x10, 20, SOFT_ROCE_BAD_PAD},
		{SOFT_ROCE_READ_REQUEST, 0, 31, SOFT_ROCE_SHORT},
		{SOFT_ROCE_READ_REQUEST, 0, 32, SOFT_ROCE_WELL_FORMED},
		{SOFT_ROCE_READ_REQUEST, 0, 36, SOFT_ROCE_BAD_PAYLOAD},
		{SOFT_ROCE_ATOMIC_WRITE, 0, 40, SOFT_ROCE_WELL_FORMED},
		{SOFT_ROCE_ATOMIC_WRITE, 0, 36, SOFT_ROCE_BAD_PAYLOAD},
		{SOFT_ROCE_ATOMIC_WRITE, 0x10, 40, SOFT_ROCE_BAD_PAYLOAD},
		{SOFT_ROCE_CNP, 0, 32, SOFT_ROCE_WELL_FORMED},
		{SOFT_ROCE_CNP, 0, 28, SOFT_ROCE_BAD_PAYLOAD},
	};

	FOR_EACH (i, cases) {
		/* Allocate the packet on the heap, so that a sanitizer finds overruns. */
		uint8_t *bytes = calloc(1, cases[i].length + 1);
		struct soft_roce_packet packet;

		memcpy(bytes, &(uint8_t[]){cases[i].opcode, cases[i].flags},
		       cases[i].length < 2 ? 0 : 2);
		CHECK_EQUAL(soft_roce_decode(&packet, bytes, cases[i].length), cases[i].why);
		free(bytes);
	}
	for (int i = 0; i < vector_count; i++)
		for (size_t cut = 0; cut < vectors[i].length; cut++) {
			uint8_t *bytes = malloc(cut + 1);
			struct soft_roce_packet packet;

			memcpy(bytes, vectors[i].bytes, cut);
			if (!soft_roce_decode(&packet, bytes, cut)) /* now a shorter packet */
				CHECK(packet.payload + packet.length <=
				      bytes + cut - SOFT_ROCE_ICRC);
			soft_icrc_check(&vectors[i].flow, bytes, cut);
			free(bytes);
		}
}

static void reserved_bits_are_ignored(void)
{
	const struct soft_roce_packet packet = {
		.opcode = SOFT_ROCE_XRC | SOFT_ROCE_FLUSH,
		.srq = 0x123456,
		.flush = 0x15,
	};
	uint8_t bytes[SOFT_ROCE_HEADERS_MAX + SOFT_ROCE_ICRC];
	size_t length = soft_roce_encode(bytes, &packet) + SOFT_ROCE_ICRC;
	struct soft_roce_packet got;

	CHECK_EQUAL(length, 12 + 4 + 4 + 16 + 4);
	bytes[4] |= 0x3f;
	bytes[8] |= 0x7f;
	bytes[12] = bytes[16] = bytes[17] = bytes[18] = 0xff;
	bytes[19] |= 0xc0;
	CHECK_EQUAL(soft_roce_decode(&got, bytes, length), SOFT_ROCE_WELL_FORMED);
	CHECK(!got.fecn && !got.becn && !got.ack_request);
	CHECK_EQUAL(got.srq, packet.srq);
	CHECK_EQUAL(got.flush, packet.flush);
}

/* ---- the ICRC of what is longer -------------------------------------------------------------- */

/* Compute the ICRC for all packet lengths, from one or several buffers, and with random
 * identifications. */
static void icrc_is_correct_for_every_length(void)
{
	static uint8_t bytes[LONGEST];

	for (size_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = (uint8_t)next_random();
	for (size_t length = SOFT_ROCE_BTH; length <= LONGEST - SOFT_ROCE_ICRC; length += 4) {
		const struct soft_icrc_flow *flow = &vectors[length / 4 % 2].flow;
		uint16_t identification = (uint16_t)next_random();
		struct iovec pieces[LONGEST / 8] = {{bytes, SOFT_ROCE_BTH}};
		int count = 1;
		uint32_t icrc = soft_icrc(flow, identification, &(struct iovec){bytes, length}, 1);

		for (size_t at = SOFT_ROCE_BTH, part; at < length; at += part) {
			part = 8 + next_random() % 50;
			if (part > length - at)
				part = length - at;
			pieces[count++] = (struct iovec){bytes + at, part};
		}
		CHECK_EQUAL(soft_icrc(flow, identification, pieces, count), icrc);
		if (!flow->ipv4)
			CHECK_EQUAL(soft_icrc(flow, (uint16_t)~identification, pieces, count),
				    icrc);

		uint8_t after[SOFT_ROCE_ICRC];

		memcpy(after, bytes + length, sizeof(after));
		memcpy(bytes + length, &(uint32_t){htole32(icrc)}, sizeof(icrc));
		CHECK(soft_icrc_check(flow, bytes, length + SOFT_ROCE_ICRC));
		CHECK(!soft_icrc_check(flow, bytes, length + SOFT_ROCE_ICRC - 1));
		if (length >= LONGEST - SOFT_ROCE_ICRC - 4) /* once with IPv4, once with IPv6 */
			expect_bit_flips_detected(flow, bytes, length + SOFT_ROCE_ICRC);
		memcpy(bytes + length, after, sizeof(after));
	}
}

int main(void)
{
	limit_seconds(60);
	read_vectors();
	STEP(packets_match_the_scapy_vectors());
	STEP(malformed_packets_are_rejected());
	STEP(reserved_bits_are_ignored());
	STEP(icrc_is_correct_for_every_length());
	STEP(random_icrcs_are_rejected(&vectors[0]));
	STEP(random_icrcs_are_rejected(&vectors[1]));
	return 0;
}
