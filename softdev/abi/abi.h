/* The ABI of libibverbs and librdmacm for C sources. This file includes all declarations and the
 * system headers that they need, and defines the tables of calls. cffi reads the same declarations
 * (lib_source.py). */
#pragma once

#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

#include "verbs.h"

#include "newer.h"

#include "rdma_cma.h"

#include "efadv.h"
#include "mlx5dv.h"

/* The value of abi_compat in a context that is part of a struct verbs_context. */
#define AIORDMA_ABI_EXTENDED ((void *)UINTPTR_MAX)

#include "device_calls.h"

struct aiordma_calls {
#define CALL(library, result, name, arguments) result(*name) arguments;
#include "calls.h"
#undef CALL
	const struct aiordma_device_calls *device; /* never NULL */
};

struct aiordma_provider_calls {
#define OPTIONAL(library, result, name, arguments) result(*name) arguments;
#include "provider_calls.h"
#undef OPTIONAL
};
