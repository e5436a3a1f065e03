/* The messages: the bytes as laid out in cm_wire.h, every cut, every wrong byte. */
#include "cm/cm_wire.h"

#include "cm_check.h"

static struct soft_cm_message example(enum soft_cm_type type)
{
	struct soft_cm_message message;

	memset(&message, 0, sizeof(message)); /* with its padding: it is compared as bytes */
	message.type = type;
	if (type == SOFT_CM_REQ || type == SOFT_CM_REP) {
		message.qpn = 0x123456;
		message.psn = 0xfedcba;
		message.responder_resources = 3;
		message.initiator_depth = 250;
		message.flow_control = 1;
		message.srq = 1;
		message.rnr_retry_count = 7;
		message.ece = (struct soft_cm_ece){0x2c9, 0xa5b6c7d8};
		message.shm_port = 0x1234;
		message.path_port = type == SOFT_CM_REP ? 0x5678 : 0;
	}
	if (type == SOFT_CM_REQ) {
		message.port_space = 0x0106;
		message.qp_type = 2;
		message.retry_count = 5;
	}
	if (type == SOFT_CM_REJ)
		message.reason = SOFT_CM_REASON_CONSUMER;
	if (type >= SOFT_SIDR_REQ)
		message.number = 0x1122334455667788;
	if (type == SOFT_SIDR_REP) {
		message.qpn = 0x123456;
		message.qkey = 0x01234567;
		message.status = SOFT_SIDR_STATUS_MAX;
	}
	message.private_data_len = soft_cm_private_room(type);
	for (int i = 0; i < message.private_data_len; i++)
		message.private_data[i] = (uint8_t)(i + 1);
	return message;
}

static void round_trip(enum soft_cm_type type)
{
	struct soft_cm_message sent = example(type);
	struct soft_cm_message got;
	uint8_t bytes[SOFT_CM_MESSAGE_MAX + 5];
	size_t length = soft_cm_encode(&sent, bytes);
	size_t used = 0;

	CHECK(length <= SOFT_CM_MESSAGE_MAX);
	for (size_t cut = 0; cut < length; cut++) {
		uint8_t *copy = malloc(cut + 1); /* AddressSanitizer sees a read behind it */

		CHECK_EQUAL(soft_cm_decode(memcpy(copy + 1, bytes, cut), cut, &got, &used), EAGAIN);
		free(copy);
	}
	CHECK_EQUAL(used, 0);
	/* What follows a message is left alone: it belongs to the queue pair's stream. */
	memset(bytes + length, 0xee, 5);
	CHECK_EQUAL(soft_cm_decode(bytes, length + 5, &got, &used), 0);
	CHECK_EQUAL(used, length);
	CHECK(memcmp(&got, &sent, sizeof(got)) == 0);
}

/* What comes before the private data: writing and reading have one list of fields, so that a change of
 * the layout would pass a round trip. */
#define MADE_OF(...) (const uint8_t[]){__VA_ARGS__}, sizeof((const uint8_t[]){__VA_ARGS__})
#define NUMBER 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11

static const struct {
	enum soft_cm_type type;
	const uint8_t *bytes;
	size_t fixed;
} layouts[] = {
	{SOFT_CM_REQ,
	 MADE_OF('A', 'R', 'C', 'M', 5, 1, 82, 0, 0x56, 0x34, 0x12, 0, 0xba, 0xdc, 0xfe, 0, 0x06,
		 0x01, 2, 3, 250, 3, 5, 7, 0xc9, 0x02, 0, 0, 0xd8, 0xc7, 0xb6, 0xa5, 0x34, 0x12)},
	{SOFT_CM_MRA, MADE_OF('A', 'R', 'C', 'M', 5, 2, 0, 0)},
	{SOFT_CM_REP,
	 MADE_OF('A', 'R', 'C', 'M', 5, 3, 220, 0, 0x56, 0x34, 0x12, 0, 0xba, 0xdc, 0xfe, 0, 3, 250,
		 3, 7, 0xc9, 0x02, 0, 0, 0xd8, 0xc7, 0xb6, 0xa5, 0x34, 0x12, 0x78, 0x56)},
	{SOFT_CM_RTU, MADE_OF('A', 'R', 'C', 'M', 5, 4, 0, 0)},
	{SOFT_CM_REJ, MADE_OF('A', 'R', 'C', 'M', 5, 5, 152, 0, 28, 0, 0, 0)},
	{SOFT_CM_DREQ, MADE_OF('A', 'R', 'C', 'M', 5, 6, 0, 0)},
	{SOFT_CM_DREP, MADE_OF('A', 'R', 'C', 'M', 5, 7, 0, 0)},
	{SOFT_SIDR_REQ, MADE_OF('A', 'R', 'C', 'M', 5, 8, 188, 0, NUMBER)},
	{SOFT_SIDR_WAIT, MADE_OF('A', 'R', 'C', 'M', 5, 9, 8, 0, NUMBER)},
	{SOFT_SIDR_REP, MADE_OF('A', 'R', 'C', 'M', 5, 10, 156, 0, NUMBER, 0x56, 0x34, 0x12, 0,
				0x67, 0x45, 0x23, 0x01, 0, 0, 5, 0)},
};

static void known_bytes(void)
{
	for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
		struct soft_cm_message sent = example(layouts[i].type);
		size_t fixed = layouts[i].fixed, room = sent.private_data_len;
		uint8_t bytes[SOFT_CM_MESSAGE_MAX];

		CHECK_EQUAL(soft_cm_encode(&sent, bytes), fixed + room);
		CHECK_EQUAL(bytes[6], fixed + room - SOFT_CM_HEADER);
		CHECK(memcmp(bytes, layouts[i].bytes, fixed) == 0);
		CHECK(memcmp(bytes + fixed, sent.private_data, room) == 0);
	}
}

static void short_private_data_is_padded(void)
{
	struct soft_cm_message reply = example(SOFT_CM_REP);
	struct soft_cm_message got;
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	size_t used;

	reply.private_data_len = 2;
	CHECK_EQUAL(soft_cm_decode(bytes, soft_cm_encode(&reply, bytes), &got, &used), 0);
	CHECK_EQUAL(got.private_data_len, SOFT_CM_REP_PRIVATE);
	CHECK_EQUAL(got.private_data[1], 2);
	for (int i = 2; i < SOFT_CM_REP_PRIVATE; i++)
		CHECK_EQUAL(got.private_data[i], 0);
}

/* Wrong bytes are found as soon as they are there. */
static void wrong_bytes(void)
{
	static const struct {
		enum soft_cm_type type;
		size_t at;
		uint8_t value;
		int error;
		size_t enough; /* bytes after which it is known */
	} cases[] = {
		{SOFT_CM_REQ, 0, 'G', EPROTO, 1},
		{SOFT_CM_REQ, 3, 'm', EPROTO, 4},
		{SOFT_CM_REQ, 4, SOFT_CM_VERSION - 1, EPROTONOSUPPORT, 5},
		{SOFT_CM_REQ, 5, 0, EPROTO, 6},
		{SOFT_CM_REQ, 5, SOFT_SIDR_REP + 1, EPROTO, 6},
		{SOFT_CM_REQ, 6, 83, EPROTO, 8},
		{SOFT_CM_REQ, 7, 1, EPROTO, 8},
		{SOFT_CM_REQ, 11, 1, EPROTO, 90},
		{SOFT_CM_REQ, 15, 1, EPROTO, 90},
		{SOFT_CM_REQ, 21, 4, EPROTO, 90},
		{SOFT_CM_REQ, 22, 8, EPROTO, 90},
		{SOFT_CM_REQ, 23, 255, EPROTO, 90},
		{SOFT_CM_REJ, 10, 1, EPROTO, 160},
		{SOFT_SIDR_REP, 19, 1, EPROTO, 164}, /* 24 bits of a number, the status, a zero */
		{SOFT_SIDR_REP, 26, SOFT_SIDR_STATUS_MAX + 1, EPROTO, 164},
		{SOFT_SIDR_REP, 27, 1, EPROTO, 164},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct soft_cm_message sent = example(cases[i].type), got;
		uint8_t bytes[SOFT_CM_MESSAGE_MAX];
		size_t length = soft_cm_encode(&sent, bytes), used;

		bytes[cases[i].at] = cases[i].value;
		CHECK_EQUAL(soft_cm_decode(bytes, cases[i].enough - 1, &got, &used), EAGAIN);
		CHECK_EQUAL(soft_cm_decode(bytes, cases[i].enough, &got, &used), cases[i].error);
		CHECK_EQUAL(soft_cm_decode(bytes, length, &got, &used), cases[i].error);
	}
}

int main(void)
{
	limit_seconds(60);
	for (int type = SOFT_CM_REQ; type <= SOFT_SIDR_REP; type++)
		round_trip((enum soft_cm_type)type);
	known_bytes();
	short_private_data_is_padded();
	wrong_bytes();
	return 0;
}
