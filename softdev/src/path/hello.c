/* Encodes and decodes the handshake of a channel or stream (frame.h). */

#include "path.h"

static const char magic[8] = "aiordma";

void soft_hello_encode(uint8_t *at, const struct soft_hello *hello)
{
	memset(at, 0, SOFT_HANDSHAKE_SIZE);
	memcpy(at, magic, sizeof(magic));
	soft_put32(at + 8, SOFT_WIRE_VERSION | (uint32_t)hello->kind << 16);
	soft_put32(at + 12, hello->from);
	soft_put32(at + 16, hello->to);
	soft_put32(at + 20, hello->receive_psn);
	soft_put32(at + 24, hello->send_psn);
	soft_put32(at + 28, hello->flags);
	soft_put32(at + 32, hello->mtu);
}

uint32_t soft_hello_version(const uint8_t *at)
{
	return memcmp(at, magic, sizeof(magic)) ? 0 : soft_get32(at + 8) & 0xffff;
}

bool soft_hello_decode(const uint8_t *at, struct soft_hello *hello)
{
	uint32_t word = soft_get32(at + 8);

	hello->kind = (uint16_t)(word >> 16);
	hello->from = soft_get32(at + 12);
	hello->to = soft_get32(at + 16);
	hello->receive_psn = soft_get32(at + 20);
	hello->send_psn = soft_get32(at + 24);
	hello->flags = soft_get32(at + 28);
	hello->mtu = soft_get32(at + 32);
	return soft_hello_version(at) == SOFT_WIRE_VERSION;
}
