/* What the C part offers to Python and to the C tests: two tables of calls, and batches. */
#ifndef AIORDMA_NATIVE_H
#define AIORDMA_NATIVE_H

#include "abi/abi.h"

struct aiordma_calls {
#define CALL(library, result, name, arguments) result(*name) arguments;
#include "calls.h"
#undef CALL
};

/* As many of them as there are: see interface.h. */
struct aiordma_provider_calls {
#define OPTIONAL(library, result, name, arguments) result(*name) arguments;
#include "provider_calls.h"
#undef OPTIONAL
};

/* abi_compat of a context that is part of a struct verbs_context. */
#define AIORDMA_ABI_EXTENDED ((void *)UINTPTR_MAX)

#include "interface.h"

#endif
