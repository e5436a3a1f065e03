/* What the C part offers to Python and to the C tests: two tables of calls, and batches. */
#ifndef AIORDMA_NATIVE_H
#define AIORDMA_NATIVE_H

#include "abi/abi.h"

#include "interface.h"

#endif
