/* Copies into and out of rings. The two sides of a ring copy at the same time on different cores,
 * which share the cache lines of the ring. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Makes soft_copy() copy long data with loads and stores instead of memcpy. Tests change it. */
extern bool soft_copy_avoids_movsb;

/* Copy into or out of a ring with the method that is faster on this processor. */
void soft_copy(uint8_t *to, const uint8_t *from, size_t length);
/* Copy with loads and stores instead of `rep movsb` on any x86-64 processor. Uses memcpy on other
 * architectures. */
void soft_copy_by_loads(uint8_t *to, const uint8_t *from, size_t length);
