/* Loads the system's libraries when they are first needed, so that aiordma can be built and
 * imported without them. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>

#include "boundary.h"

struct library {
	const char *soname;
	const char *packages; /* packages to install on common distributions */
};

static const struct library verbs_library = {
	"libibverbs.so.1",
	"libibverbs1 and ibverbs-providers (Debian, Ubuntu), libibverbs (Fedora, RHEL), "
	"rdma-core (Arch)",
};
static const struct library cm_library = {
	"librdmacm.so.1",
	"librdmacm1 (Debian, Ubuntu), librdmacm (Fedora, RHEL), rdma-core (Arch)",
};

/* Load a library. Returns NULL and writes a message to `error` on failure. */
static void *open_library(const struct library *library, char *error, size_t error_size)
{
	void *handle = dlopen(library->soname, RTLD_NOW | RTLD_LOCAL);
	const char *reason = NULL;

	if (!handle)
		reason = dlerror();
	else if (dlsym(handle, "aiordma_run")) /* softdev/preload */
		reason = "under `aiordma run`, it is the embedded device";
	if (!reason)
		return handle;
	snprintf(error, error_size, "library %s cannot be loaded (%s); install %s", library->soname,
		 reason, library->packages);
	return NULL;
}

static int find_symbol(void *handle, const struct library *library, const char *name, int optional,
		       void **symbol, char *error, size_t error_size)
{
	*symbol = dlsym(handle, name);
	if (*symbol || optional)
		return 0;
	snprintf(error, error_size, "symbol %s is missing in %s, which is too old; update %s", name,
		 library->soname, library->packages);
	return ENOSYS;
}

/* Of the calls that are not verbs, the system's libraries only offer those of providers. */
static const struct aiordma_device_calls device = {.provider_calls = aiordma_installed_providers};

/* Fill the table with the functions of both libraries. Returns 0, or an errno value with a message
 * in `error`. */
static int load(struct aiordma_calls *table, char *error, size_t error_size)
{
	/* Never close the handles. The providers that libibverbs loads have threads and fork
	 * handlers, whose code must stay loaded. */
	void *verbs = open_library(&verbs_library, error, error_size);
	void *cm = verbs ? open_library(&cm_library, error, error_size) : NULL;

	if (!verbs || !cm)
		return ENOENT;
	table->device = &device;
#define FIND(library, name, optional)                                                              \
	{                                                                                          \
		void *symbol;                                                                      \
		int rc = find_symbol(library, &library##_library, #name, optional, &symbol, error, \
				     error_size);                                                  \
		if (rc)                                                                            \
			return rc;                                                                 \
		*(void **)&table->name = symbol;                                                   \
	}
#define CALL(library, result, name, arguments) FIND(library, name, 0)
#define OPTIONAL(library, result, name, arguments) FIND(library, name, 1)
#include "abi/calls.h"
#undef CALL
#undef FIND
	return 0;
}

int aiordma_system_calls(const struct aiordma_calls **calls, char *error, size_t error_size)
{
	static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
	static struct aiordma_calls table;
	static int loaded;
	int rc = 0;

	pthread_mutex_lock(&mutex);
	if (!loaded) {
		rc = load(&table, error, error_size);
		loaded = rc == 0;
	}
	pthread_mutex_unlock(&mutex);
	*calls = rc ? NULL : &table;
	return rc;
}
