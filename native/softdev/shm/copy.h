/* Copying into rings and out of them, which two cores do at the same time on the same lines. */
#ifndef AIORDMA_SOFTDEV_SHM_COPY_H
#define AIORDMA_SOFTDEV_SHM_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As memcpy does it, or by loads and stores where that is better for what is long; for tests. */
extern bool soft_copies_plainly;

void soft_copy(uint8_t *to, const uint8_t *from, size_t length);
/* By loads and stores, wherever this is. */
void soft_copy_plainly(uint8_t *to, const uint8_t *from, size_t length);

#endif
