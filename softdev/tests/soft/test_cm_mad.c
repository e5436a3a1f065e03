/* Test encoding the connection manager's messages as MADs. The encoding must match known bytes, and
 * invalid MADs must be rejected. */
#include "cm/cm_mad.h"

#include "cm_check.h"

static const uint8_t ipv4[2][16] = {{[10] = 0xff, 0xff, 192, 0, 2, 1},
				    {[10] = 0xff, 0xff, 192, 0, 2, 2}};

static struct soft_cm_mad example_mad(enum soft_cm_type type)
{
	struct soft_cm_mad mad;
	struct soft_cm_message *message = &mad.message;

	memset(&mad, 0, sizeof(mad)); /* also clears the padding for memcmp() */
	message->type = type;
	mad.transaction = 0x1122334455667788;
	if (type != SOFT_SIDR_REP)
		mad.local_id = 0xa1a2a3a4;
	if (type != SOFT_CM_REQ && type != SOFT_SIDR_REQ)
		mad.remote_id = 0xb1b2b3b4;
	if (type == SOFT_CM_REQ || type == SOFT_CM_REP) {
		mad.guid = 0xc1c2c3c4c5c6c7c8;
		message->qpn = 0x123456;
		message->psn = 0xfedcba;
		message->responder_resources = 3;
		message->initiator_depth = 250;
		message->flow_control = 1;
		message->srq = 1;
		message->rnr_retry_count = 6;
		message->ece = (struct soft_cm_ece){0x0002c9, 0xa5b6c7d8};
	}
	if (type == SOFT_CM_REQ) {
		message->qp_type = 3; /* UC */
		message->retry_count = 5;
		message->path_mtu = 3;
		message->traffic_class = 0x28;
	}
	if (type == SOFT_CM_MRA || type == SOFT_CM_REJ)
		mad.responds_to = SOFT_CM_RESPONDS_TO_REP;
	if (type == SOFT_CM_MRA)
		message->service_timeout = 24;
	if (type == SOFT_CM_REJ) {
		mad.guid = 0xc1c2c3c4c5c6c7c8;
		mad.guid_length = 8;
		message->reason = 0x1c1d;
	}
	if (type == SOFT_CM_DREQ)
		mad.peer_qpn = 0x654321;
	if (type == SOFT_SIDR_REP) {
		message->status = 2;
		message->qpn = 0x123456;
		message->qkey = 0x01234567;
	}
	if (type == SOFT_CM_REQ || type >= SOFT_SIDR_REQ) {
		message->port_space = 0x0106;
		mad.service_prefix = 0x51525354;
		mad.service_port = 0x1e61;
	}
	if (type == SOFT_CM_REQ || type == SOFT_SIDR_REQ) {
		mad.source_port = 0x8001;
		memcpy(mad.source, ipv4[0], 16);
		memcpy(mad.destination, ipv4[1], 16);
	}
	message->private_data_len = soft_cm_max_private_data(type);
	for (int i = 0; i < message->private_data_len; i++)
		message->private_data[i] = (uint8_t)(i + 1);
	return mad;
}

/* Expected bytes, whose offset `at` is relative to the end of the MAD header. */
struct run {
	uint8_t at;
	const char *hex;
};

#define IDS "a1a2a3a4b1b2b3b4"
#define ADDRESSES "00408001000000000000000000000000c0000201000000000000000000000000c0000202"

static const struct {
	enum soft_cm_type type;
	uint8_t attribute, private_at;
	struct run runs[11];
} layouts[] = {
	{SOFT_CM_REQ,
	 0x10,
	 140 + 36,
	 {{0, "a1a2a3a4000002c9"},
	  {8, "5152535401061e61c1c2c3c4c5c6c7c8"},
	  {32, "12345603000000fa000000a3fedcbaa5"},
	  {48, "ffff36f8ffffffff"},
	  {56, "00000000000000000000ffffc0000201"},
	  {72, "00000000000000000000ffffc0000202"},
	  {91, "03"},
	  {92, "2840"},
	  {95, "90"},
	  {140, ADDRESSES}}},
	{SOFT_CM_MRA, 0x11, 10, {{0, IDS "40c0"}}},
	{SOFT_CM_REJ, 0x12, 84, {{0, IDS "40101c1dc1c2c3c4c5c6c7c8"}}},
	{SOFT_CM_REP,
	 0x13,
	 36,
	 {{0, IDS}, {12, "1234560000000002fedcbac903fa01d0c1c2c3c4c5c6c7c8"}}},
	{SOFT_CM_RTU, 0x14, 8, {{0, IDS}}},
	{SOFT_CM_DREQ, 0x15, 12, {{0, IDS "654321"}}},
	{SOFT_CM_DREP, 0x16, 8, {{0, IDS}}},
	{SOFT_SIDR_REQ, 0x17, 16 + 36, {{0, "a1a2a3a4ffff00005152535401061e61"}, {16, ADDRESSES}}},
	{SOFT_SIDR_REP, 0x18, 96, {{0, "b1b2b3b402000000123456005152535401061e6101234567"}}},
};

static void mads_encode_to_known_bytes(void)
{
	FOR_EACH (i, layouts) {
		struct soft_cm_mad mad = example_mad(layouts[i].type);
		uint8_t bytes[SOFT_MAD_SIZE],
			expected[SOFT_MAD_SIZE] = {1,    0x07, 2,    0x03, [8] = 0x11, 0x22,
						   0x33, 0x44, 0x55, 0x66, 0x77,       0x88};
		uint8_t *fields = expected + SOFT_MAD_HEADER;
		unsigned byte;

		for (const struct run *run = layouts[i].runs; run->hex; run++)
			for (int at = 0; sscanf(run->hex + 2 * at, "%2x", &byte) == 1; at++)
				fields[run->at + at] = (uint8_t)byte;
		expected[17] = layouts[i].attribute;
		if (mad.message.ece.options)
			memcpy(expected + 20, (const uint8_t[]){0xa5, 0xb6, 0xc7, 0xd8}, 4);
		memcpy(fields + layouts[i].private_at, mad.message.private_data,
		       mad.message.private_data_len);
		soft_cm_mad_encode(&mad, bytes);
		for (size_t at = 0; at < sizeof(bytes); at++)
			if (bytes[at] != expected[at])
				fprintf(stderr, "type %d, byte %zu: %02x, not %02x\n",
					layouts[i].type, at, bytes[at], expected[at]);
		CHECK(!memcmp(bytes, expected, sizeof(bytes)));
	}
}

static void decoder_rejects_invalid_header_fields(void)
{
	/* Each change makes one of these fields invalid: base version, class, class version,
	 * method, attribute ID, or the CMA version or IP version in the rdma_cm header. */
	static const struct {
		uint8_t at, value;
	} wrong[] = {{0, 2},     {1, 0x03},  {2, 1},   {3, 0x81},  {16, 1},
		     {17, 0x0f}, {17, 0x19}, {164, 1}, {165, 0x50}};
	struct soft_cm_mad mad = example_mad(SOFT_CM_REQ), got;
	uint8_t bytes[SOFT_MAD_SIZE];

	FOR_EACH (i, wrong) {
		soft_cm_mad_encode(&mad, bytes);
		bytes[wrong[i].at] = wrong[i].value;
		CHECK(!soft_cm_mad_decode(bytes, sizeof(bytes), &got));
	}
}

/* Check that the decoder reports truncated messages as incomplete (EAGAIN), and corrupted or
 * unknown ones as invalid (EPROTO). REQ and REP must keep their port numbers. */
static void stream_decoder_detects_truncation_and_corruption(void)
{
	for (int type = SOFT_CM_REQ; type <= SOFT_SIDR_REP; type++) {
		struct soft_cm_message sent = example_mad((enum soft_cm_type)type).message, got;
		bool has_ports = type == SOFT_CM_REQ || type == SOFT_CM_REP;
		uint8_t bytes[SOFT_MAD_SIZE];

		sent.number = 0x1122334455667788;
		sent.shm_port = has_ports ? 0x1234 : 0;
		sent.path_port = has_ports ? 0x5678 : 0;
		soft_cm_encode(&sent, bytes);
		for (size_t cut = 0; cut < sizeof(bytes); cut++) {
			/* Use a copy of the exact size, so that AddressSanitizer detects reads
			 * beyond its end. */
			uint8_t *copy = malloc(cut + 1);

			memcpy(copy + 1, bytes, cut);
			CHECK_EQUAL(soft_cm_decode(copy + 1, cut, &got), EAGAIN);
			if (cut) {
				copy[cut < 4 ? cut : 4] ^= 1;
				CHECK_EQUAL(soft_cm_decode(copy + 1, cut, &got), EPROTO);
			}
			free(copy);
		}
		CHECK_EQUAL(soft_cm_decode(bytes, sizeof(bytes), &got), 0);
		sent.path_mtu = sent.traffic_class = 0; /* ignored if chosen by the peer */
		CHECK(memcmp(&got, &sent, sizeof(got)) == 0);
		bytes[17] = 0x19; /* unknown attribute ID */
		CHECK_EQUAL(soft_cm_decode(bytes, sizeof(bytes), &got), EPROTO);
	}
}

int main(void)
{
	limit_seconds(60);
	STEP(mads_encode_to_known_bytes());
	STEP(decoder_rejects_invalid_header_fields());
	STEP(stream_decoder_detects_truncation_and_corruption());
	return 0;
}
