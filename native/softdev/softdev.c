/* The embedded device's table of calls. */
#include "softdev.h"

static const struct aiordma_calls table = {
#define CALL(library, result, name, arguments) .name = soft_##name,
#include "calls.h"
#undef CALL
};

const struct aiordma_calls *aiordma_embedded_calls(void)
{
	return &table;
}
