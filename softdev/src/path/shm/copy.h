/* Copying into and out of rings, which two cores do at the same time on the same cache lines. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether soft_copy() uses loads and stores instead of memcpy for long payloads. Tests set it. */
extern bool soft_copy_avoids_movsb;

void soft_copy(uint8_t *to, const uint8_t *from, size_t length);
/* Copy with loads and stores on every processor. */
void soft_copy_by_loads(uint8_t *to, const uint8_t *from, size_t length);
