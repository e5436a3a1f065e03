/* See icrc.h. */
#include "icrc.h"

#include <endian.h>
#include <string.h>

#include "headers.h"

enum {
	LRH = 8,
	IPV4 = 20,
	IPV6 = 40,
	UDP = 8,
	DONT_FRAGMENT = 0x40,
	PROTOCOL_UDP = 17,
};

#define POLYNOMIAL 0xedb88320u /* of Ethernet, x^31 in bit 0 */

static uint32_t update(uint32_t crc, const uint8_t *bytes, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		crc ^= bytes[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
	}
	return crc;
}

static void put16(uint8_t *at, size_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

void soft_icrc_flow(struct soft_icrc_flow *flow, const uint8_t source[16],
		    const uint8_t destination[16], uint16_t source_port, uint16_t destination_port)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	/* IP, then UDP */
	uint8_t *at = flow->bytes + LRH;

	*flow = (struct soft_icrc_flow){.ipv4 = !memcmp(source, mapped, sizeof(mapped))};
	memset(flow->bytes, 0xff, LRH);
	if (flow->ipv4) {
		at[0] = 0x45;
		at[1] = 0xff; /* TOS */
		at[6] = DONT_FRAGMENT;
		at[8] = 0xff; /* TTL */
		at[9] = PROTOCOL_UDP;
		at[10] = at[11] = 0xff; /* checksum */
		memcpy(at + 12, source + 12, 4);
		memcpy(at + 16, destination + 12, 4);
		at += IPV4;
	} else {
		at[0] = 0x6f; /* version; class and flow label are ones */
		at[1] = at[2] = at[3] = 0xff;
		at[6] = PROTOCOL_UDP;
		at[7] = 0xff; /* hop limit */
		memcpy(at + 8, source, 16);
		memcpy(at + 24, destination, 16);
		at += IPV6;
	}
	put16(at, source_port);
	put16(at + 2, destination_port);
	at[6] = at[7] = 0xff; /* checksum */
	flow->length = (uint8_t)(at + UDP - flow->bytes);
}

/* Of the LRH up to the BTH, in which FECN, BECN and the reserved bits beside them are ones. */
static uint32_t headers_crc(const struct soft_icrc_flow *flow, uint16_t identification,
			    const uint8_t *bth, size_t length)
{
	uint8_t bytes[sizeof(flow->bytes) + SOFT_ROCE_BTH];

	memcpy(bytes, flow->bytes, sizeof(flow->bytes));
	memcpy(bytes + flow->length, bth, SOFT_ROCE_BTH);
	length += UDP + SOFT_ROCE_ICRC;
	put16(bytes + flow->length - 4, length);
	if (flow->ipv4) {
		put16(bytes + LRH + 2, length + IPV4);
		put16(bytes + LRH + 4, identification);
	} else {
		put16(bytes + LRH + 4, length);
	}
	bytes[flow->length + 4] = 0xff;
	return update(0xffffffff, bytes, flow->length + (size_t)SOFT_ROCE_BTH);
}

uint32_t soft_icrc(const struct soft_icrc_flow *flow, uint16_t identification,
		   const struct iovec *pieces, int count)
{
	const uint8_t *bth = pieces[0].iov_base;
	size_t length = 0;
	uint32_t crc;

	for (int i = 0; i < count; i++)
		length += pieces[i].iov_len;
	crc = headers_crc(flow, identification, bth, length);
	crc = update(crc, bth + SOFT_ROCE_BTH, pieces[0].iov_len - SOFT_ROCE_BTH);
	for (int i = 1; i < count; i++)
		crc = update(crc, pieces[i].iov_base, pieces[i].iov_len);
	return ~crc;
}

/* A CRC is linear, and its register can be run backwards.  What a packet's ICRC differs by from that of
 * the same packet with identification zero, run back to before the identification, is the 16 bits of
 * the identification and 16 zeros, if only the identification differs.  Those 16 zeros are what is left to check. */
static uint32_t run_back(uint32_t crc, size_t bytes)
{
	while (bytes--)
		for (int bit = 0; bit < 8; bit++)
			crc = crc & 0x80000000 ? (crc ^ POLYNOMIAL) << 1 | 1 : crc << 1;
	return crc;
}

bool soft_icrc_check(const struct soft_icrc_flow *flow, const uint8_t *bytes, size_t length)
{
	uint32_t stored, wrong;

	if (length < SOFT_ROCE_BTH + SOFT_ROCE_ICRC)
		return false;
	length -= SOFT_ROCE_ICRC;
	memcpy(&stored, bytes + length, sizeof(stored));
	wrong = le32toh(stored) ^ soft_icrc(flow, 0, &(struct iovec){(void *)bytes, length}, 1);
	if (!flow->ipv4)
		return !wrong;
	return run_back(wrong, IPV4 - 4 + UDP + length) <= UINT16_MAX;
}
