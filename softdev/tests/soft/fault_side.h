/* Helpers that set a fault spec and read the fault counts, for tests of fault injection. */
#pragma once

#include <stdarg.h>

#include "verbs_side.h"

__attribute__((format(printf, 1, 2))) static inline void spec(const char *format, ...)
{
	char text[256], error[256] = "";
	va_list arguments;

	va_start(arguments, format);
	CHECK(vsnprintf(text, sizeof(text), format, arguments) < (int)sizeof(text));
	va_end(arguments);
	if (aiordma_embedded_faults(text, error, sizeof(error))) {
		fprintf(stderr, "in %s: fault spec %s: %s\n", current_step, text, error);
		exit(1);
	}
}

static inline void no_faults(void)
{
	CHECK_OK(aiordma_embedded_faults(NULL, NULL, 0));
}

/* Select the kind of links for devices that are opened from now on. */
static inline void use_links(const char *wire)
{
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", wire, 1));
}

static inline struct aiordma_fault_counts fault_counts(void)
{
	struct aiordma_fault_counts counts;

	aiordma_embedded_fault_counts(&counts);
	return counts;
}
