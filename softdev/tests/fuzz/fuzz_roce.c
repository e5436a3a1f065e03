/* Fuzz the RoCE v2 decoder with UDP payloads from the network. It must not read beyond the payload,
 * a decoded packet must encode to the same bytes, and a valid packet must pass the ICRC check.
 *
 * Input bytes: 0 IPv4 or IPv6, 1-2 IP identification, 3 position of the split for the ICRC, and
 * then the packet.
 */
#include "path/roce/headers.h"
#include "path/roce/icrc.h"

#include <endian.h>

#include "fuzz.h"

enum { PREFIX = 4 };

/* Clear the reserved bits of the headers. */
static void clear_reserved(uint8_t *bytes)
{
	const int has = soft_roce_headers(bytes[0]);
	uint8_t *at = bytes + SOFT_ROCE_BTH;

	bytes[4] &= 0xc0;
	bytes[8] &= 0x80;
	if (has & SOFT_ROCE_DETH)
		at[4] = 0, at += 8;
	if (has & SOFT_ROCE_XRCETH)
		at[0] = 0, at += 4;
	if (has & SOFT_ROCE_FETH)
		at[0] = at[1] = at[2] = 0, at[3] &= 0x3f;
}

static void expect_valid_packet_accepted(const struct soft_icrc_flow *flow, const uint8_t *data,
					 uint8_t *bytes, size_t length)
{
	size_t first = SOFT_ROCE_BTH + data[3] % (length - SOFT_ROCE_BTH + 1);
	struct iovec pieces[] = {{bytes, first}, {bytes + first, length - first}};
	uint32_t icrc = htole32(soft_icrc(flow, fuzz16(data + 1), pieces, 2));

	memcpy(bytes + length, &icrc, sizeof(icrc));
	CHECK(soft_icrc_check(flow, bytes, length + SOFT_ROCE_ICRC));
	bytes[4] = (uint8_t)~bytes[4]; /* routers may change this byte */
	CHECK(soft_icrc_check(flow, bytes, length + SOFT_ROCE_ICRC));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint8_t ipv4[16] = {[10] = 0xff, [11] = 0xff}, ipv6[16] = {0xfd};
	uint8_t headers[SOFT_ROCE_HEADERS_MAX];
	struct soft_roce_packet packet;
	struct soft_icrc_flow flow;
	size_t length, encoded;
	uint8_t *bytes;

	if (size < PREFIX)
		return 0;
	length = size - PREFIX;
	CHECK(bytes = malloc(length + !length));
	memcpy(bytes, data + PREFIX, length);
	soft_icrc_flow_init(&flow, data[0] & 1 ? ipv4 : ipv6, data[0] & 1 ? ipv4 : ipv6,
			    fuzz16(data), SOFT_ROCE_PORT);
	soft_icrc_check(&flow, bytes, length);
	if (soft_roce_decode(&packet, bytes, length) == SOFT_ROCE_WELL_FORMED) {
		encoded = soft_roce_encode(headers, &packet);
		CHECK(packet.payload == bytes + encoded);
		CHECK_EQUAL(encoded + packet.length + soft_roce_pad(packet.length) + SOFT_ROCE_ICRC,
			    length);
		clear_reserved(bytes);
		CHECK(!memcmp(headers, bytes, encoded));
	}
	if (length >= SOFT_ROCE_BTH + SOFT_ROCE_ICRC && length % 4 == 0)
		expect_valid_packet_accepted(&flow, data, bytes, length - SOFT_ROCE_ICRC);
	free(bytes);
	return 0;
}
