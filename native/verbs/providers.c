/* Loads calls of provider libraries when they are first needed. */
#include <dlfcn.h>

#include "boundary.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct aiordma_provider_calls found;

/* Set `*call` to a function of a provider library, or to NULL if it is not installed. */
static void find_call(const char *soname, const char *name, void **call)
{
	/* The library is never closed, because libibverbs does not close its providers either. If
	 * the library is not installed, the next search tries to load it again. */
	void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);

	*call = library ? dlsym(library, name) : NULL;
}

const struct aiordma_provider_calls *aiordma_installed_providers(void)
{
	pthread_mutex_lock(&mutex);
#define OPTIONAL(library, result, name, arguments)                                                 \
	if (!found.name)                                                                           \
		find_call("lib" #library ".so.1", #name, (void **)&found.name);
#include "abi/provider_calls.h"
#undef OPTIONAL
	pthread_mutex_unlock(&mutex);
	return &found;
}

const struct aiordma_provider_calls *aiordma_provider_calls(const struct aiordma_calls *calls)
{
	static const struct aiordma_provider_calls none;

	return calls->device->provider_calls ? calls->device->provider_calls() : &none;
}
