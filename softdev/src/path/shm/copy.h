/* Copying into rings and out of them, which two cores do at the same time on the same lines. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether soft_copy takes loads and stores for long payload, and not memcpy; tests set it. */
extern bool soft_copy_avoids_movsb;

void soft_copy(uint8_t *to, const uint8_t *from, size_t length);
/* By loads and stores, on every processor. */
void soft_copy_by_loads(uint8_t *to, const uint8_t *from, size_t length);
