/* What the C part offers to Python, to aiordma/_datapath and to the C tests: verbs of either library
 * in batches. */
#pragma once

#include "abi/abi.h"

#include "interface.h"

/* Of CLOCK_MONOTONIC. */
uint64_t aiordma_microseconds(void);
