/* The C functions for Python, aiordma/_datapath and the C tests: verbs of either library in
 * batches. */
#pragma once

#include "abi/abi.h"

#include "interface.h"

/* Returns the time of CLOCK_MONOTONIC. */
uint64_t aiordma_microseconds(void);
