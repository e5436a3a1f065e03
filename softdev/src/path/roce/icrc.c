/* Compute the invariant CRC (icrc.h). */
#include "icrc.h"

#include <endian.h>
#include <string.h>

#include "headers.h"

enum { LRH = 8, IPV4 = 20, IPV6 = 40, UDP = 8, DONT_FRAGMENT = 0x40, PROTOCOL_UDP = 17 };

/* ---- the CRC ------------------------------------------------------------------------------- */

/* A CRC register represents a polynomial over GF(2). As in Ethernet, the bits are reversed: bit 0
 * is the coefficient of x^31. */
#define POLYNOMIAL 0xedb88320u
#define NEXT(crc) ((crc) >> 1 ^ (POLYNOMIAL & -((crc) & 1u))) /* appends a zero bit */

/* The CRC register after one byte followed by `k` zero bytes, indexed by `k` and the byte. */
static uint32_t crc_tables[8][256];

__attribute__((constructor)) static void make_crc_tables(void)
{
	for (int k = 0; k < 8; k++)
		for (uint32_t byte = 0; byte < 256; byte++) {
			uint32_t crc = k ? crc_tables[k - 1][byte] : byte;

			for (int bit = 0; bit < 8; bit++)
				crc = NEXT(crc);
			crc_tables[k][byte] = crc;
		}
}

/* Update the CRC register with lookup tables, eight bytes at a time ("slicing by 8"). */
static uint32_t update_by_tables(uint32_t crc, const uint8_t *bytes, size_t length)
{
	for (; length >= 8; length -= 8, bytes += 8) {
		uint64_t word;

		memcpy(&word, bytes, 8);
		word = le64toh(word) ^ crc;
		crc = crc_tables[7][word & 255] ^ crc_tables[6][word >> 8 & 255] ^
		      crc_tables[5][word >> 16 & 255] ^ crc_tables[4][word >> 24 & 255] ^
		      crc_tables[3][word >> 32 & 255] ^ crc_tables[2][word >> 40 & 255] ^
		      crc_tables[1][word >> 48 & 255] ^ crc_tables[0][word >> 56];
	}
	for (; length; length--)
		crc = crc >> 8 ^ crc_tables[0][(crc ^ *bytes++) & 255];
	return crc;
}

#ifdef __x86_64__
#include <wmmintrin.h>

#define CARRYLESS __attribute__((target("pclmul")))

enum { LANE = 16, LANES = 4 };

static inline __m128i load(const uint8_t *at)
{
	return _mm_loadu_si128((const void *)at);
}

/* Shift `lane` forward by the distance encoded in `factor`, and add the result to `there`, the lane
 * at the new position. */
CARRYLESS static inline __m128i fold(__m128i lane, __m128i factor, __m128i there)
{
	return there ^ _mm_clmulepi64_si128(lane, factor, 0x00) ^
	       _mm_clmulepi64_si128(lane, factor, 0x11);
}

/* Update the CRC register with carry-less multiplication, as in Intel's "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ". To shift a lane forward by n bits, its halves are
 * multiplied by x^(n + 32) and x^(n - 32). */
CARRYLESS static uint32_t update_by_lanes(uint32_t crc, const uint8_t *bytes, size_t length)
{
	const __m128i by_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
	const __m128i by_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
	const uint8_t *end = bytes + length;
	__m128i all = load(bytes) ^ _mm_cvtsi32_si128((int)crc);
	uint8_t last[LANE];

	bytes += LANE;
	if (length >= LANES * LANE) {
		/* Use four variables because the compiler would keep an array in memory, not in
		 * registers. */
		__m128i second = load(bytes), third = load(bytes + LANE),
			fourth = load(bytes + 2 * LANE);

		for (bytes += 3 * LANE; end - bytes >= LANES * LANE; bytes += LANES * LANE) {
			all = fold(all, by_four, load(bytes));
			second = fold(second, by_four, load(bytes + LANE));
			third = fold(third, by_four, load(bytes + 2 * LANE));
			fourth = fold(fourth, by_four, load(bytes + 3 * LANE));
		}
		all = fold(all, by_one, second);
		all = fold(all, by_one, third);
		all = fold(all, by_one, fourth);
	}
	for (; end - bytes >= LANE; bytes += LANE)
		all = fold(all, by_one, load(bytes));
	_mm_storeu_si128((void *)last, all);
	return update_by_tables(update_by_tables(0, last, LANE), bytes, (size_t)(end - bytes));
}
#endif

/* Update the CRC register with the fastest method that the processor supports. */
static uint32_t update(uint32_t crc, const uint8_t *bytes, size_t length)
{
#ifdef __x86_64__
	if (length >= 2 * LANE && __builtin_cpu_supports("pclmul"))
		return update_by_lanes(crc, bytes, length);
#endif
	return update_by_tables(crc, bytes, length);
}

/* ---- packets ------------------------------------------------------------------------------- */

static void put16(uint8_t *at, size_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

void soft_icrc_flow_init(struct soft_icrc_flow *flow, const uint8_t source[16],
			 const uint8_t destination[16], uint16_t source_port,
			 uint16_t destination_port)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	/* start of the IP header, later of the UDP header */
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
		at[0] = 0x6f; /* version 6; traffic class and flow label masked with ones */
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

/* Returns the CRC register after the LRH, the IP and UDP headers and the BTH. The byte of the BTH
 * that contains FECN and BECN is replaced with ones. `length` is the number of bytes from the BTH
 * to the padding. */
static uint32_t headers_crc(const struct soft_icrc_flow *flow, uint16_t identification,
			    const uint8_t *bth, size_t length)
{
	uint8_t bytes[sizeof(flow->bytes) + SOFT_ROCE_BTH];

	memcpy(bytes, flow->bytes, sizeof(flow->bytes));
	memcpy(bytes + flow->length, bth, SOFT_ROCE_BTH);
	length += UDP + SOFT_ROCE_ICRC;
	put16(bytes + flow->length - 4, length); /* UDP length */
	if (flow->ipv4) {
		put16(bytes + LRH + 2, length + IPV4); /* total length */
		put16(bytes + LRH + 4, identification);
	} else {
		put16(bytes + LRH + 4, length); /* payload length */
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

/* ---- checking without the identification --------------------------------------------------- */

/* Multiply two polynomials modulo the polynomial of the CRC. */
static uint32_t multiply_polynomials(uint32_t a, uint32_t b)
{
	uint32_t sum = 0;

	for (; a; a <<= 1, b = NEXT(b))
		sum ^= b & -(a >> 31);
	return sum;
}

/* Undo the CRC steps for `words` 32-bit zero words. Returns the earlier value of the register. */
static uint32_t run_back(uint32_t crc, size_t words)
{
	/* x^-32, x^-64, x^-128 ... */
	static const uint32_t factors[] = {
		0x5b358fd3, 0x2e9bb40b, 0x12a59a49, 0x8df9403d, 0x5139de12, 0xba340226, 0x29c45641,
		0x12fbc105, 0xecd30c55, 0x3755ebd8, 0x24ee460c, 0x23783fcf, 0x479933fc, 0xa39442a5,
	};

	for (const uint32_t *factor = factors; words; words >>= 1, factor++)
		if (words & 1)
			crc = multiply_polynomials(crc, *factor);
	return crc;
}

/* Check the ICRC without knowing the IPv4 identification. A CRC is linear, so the XOR of the ICRCs
 * of two packets of equal length depends only on the XOR of the packets. Take the XOR of the
 * received ICRC and the ICRC of the same packet with identification 0. Undoing the CRC steps back
 * to this field yields the identification in the lower half and zeros in the upper half. A damaged
 * packet passes this check with a probability of 1 in 65,536. */
bool soft_icrc_check(const struct soft_icrc_flow *flow, const uint8_t *bytes, size_t length)
{
	uint32_t difference;

	if (length < SOFT_ROCE_BTH + SOFT_ROCE_ICRC || length > UINT16_MAX - UDP - IPV4 ||
	    length % 4)
		return false;
	length -= SOFT_ROCE_ICRC;
	memcpy(&difference, bytes + length, sizeof(difference));
	difference =
		le32toh(difference) ^ soft_icrc(flow, 0, &(struct iovec){(void *)bytes, length}, 1);
	if (!difference || !flow->ipv4)
		return !difference;
	return run_back(difference, (IPV4 - 4 + UDP + length) / 4) <= UINT16_MAX;
}
