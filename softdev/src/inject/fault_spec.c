/* Parser for fault specs in the format of aiordma_embedded_faults (embedded.h).
 *
 * The result depends only on the text and the number of devices. The spec in the environment is
 * applied at most once.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inject.h"

#define VARIABLE "AIORDMA_EMBEDDED_FAULTS"

enum { ALL_FRAMES = SOFT_FAULT_REQUESTS | SOFT_FAULT_RESPONSES };

/* Parse all of `text` into `value`. Returns NULL, or a description of the valid values. */
typedef const char *(*value_parser)(const char *text, void *value);

struct unit {
	const char *name;
	double size;
};

/* ---- values -------------------------------------------------------------------------------- */

static bool read_integer(const char *text, const char **end, uint64_t *value)
{
	char *rest;

	if (*text < '0' || *text > '9') /* strtoull would accept a sign */
		return false;
	errno = 0;
	*value = strtoull(text, &rest, 10);
	*end = rest;
	return !errno;
}

static const char *read_number(const char *text, void *value)
{
	const char *end;

	return read_integer(text, &end, value) && !*end ? NULL : "expected a number";
}

static const char *read_number32(const char *text, void *value)
{
	uint64_t number;
	const char *end;

	if (!read_integer(text, &end, &number) || *end || !number || number > UINT32_MAX)
		return "expected a number from 1 to 4294967295";
	*(uint32_t *)value = (uint32_t)number;
	return NULL;
}

/* Parse digits with an optional decimal point. strtod() is not used because it depends on the
 * locale. */
static bool read_decimal(const char *text, const char **end, double *value)
{
	double scale = 1;

	*value = 0;
	*end = text;
	while (**end >= '0' && **end <= '9')
		*value = *value * 10 + (*(*end)++ - '0');
	if (**end == '.')
		for (++*end; **end >= '0' && **end <= '9'; ++*end)
			*value += (**end - '0') * (scale /= 10);
	return *end > text && (*end)[-1] != '.';
}

static bool read_with_unit(const char *text, const struct unit *units, uint64_t *value)
{
	double number;
	const char *end;

	if (!read_decimal(text, &end, &number))
		return false;
	for (; units->name; units++)
		if (!strcmp(end, units->name) && number * units->size < 9e18) {
			*value = (uint64_t)(number * units->size);
			return true;
		}
	return false;
}

static const char *read_time(const char *text, void *value)
{
	static const struct unit units[] = {
		{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {NULL, 0},
	};

	return read_with_unit(text, units, value) && *(uint64_t *)value <= 3600000000000u
		       ? NULL
		       : "expected a time such as 10us, 2ms or 1.5s, at most an hour";
}

static const char *read_bytes(const char *text, void *value)
{
	static const struct unit units[] = {
		{"", 1},       {"B", 1},         {"kB", 1e3},         {"MB", 1e6}, {"GB", 1e9},
		{"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}, {NULL, 0},
	};

	return read_with_unit(text, units, value)
		       ? NULL
		       : "expected a number of bytes such as 4096, 64KiB or 10MB";
}

static const char *read_rate(const char *text, void *value)
{
	const char *error = read_bytes(text, value);

	return error || *(uint64_t *)value ? error : "expected at least 1 byte per second";
}

static const char *read_schedule(const char *text, void *value)
{
	static const char *const expected = "expected a probability from 0 to 1, an occurrence "
					    "such as @3, @3-5 or @3-, or both";
	struct soft_fault_schedule schedule = {.probability = 1, .first = 1, .last = UINT64_MAX};
	const char *at = text;

	if (*at != '@' && !read_decimal(text, &at, &schedule.probability))
		return expected;
	if (*at == '@') {
		if (!read_integer(at + 1, &at, &schedule.first))
			return expected;
		schedule.last = schedule.first;
		if (*at == '-') {
			schedule.last = UINT64_MAX;
			if (*++at && !read_integer(at, &at, &schedule.last))
				return expected;
		}
	}
	if (*at || schedule.probability > 1 || !schedule.first || schedule.last < schedule.first)
		return expected;
	*(struct soft_fault_schedule *)value = schedule;
	return NULL;
}

static const char *read_frames(const char *text, void *value)
{
	static const struct {
		const char *name;
		unsigned frames;
	} choices[] = {
		{"requests", SOFT_FAULT_REQUESTS},
		{"answers", SOFT_FAULT_RESPONSES},
		{"all", ALL_FRAMES},
	};

	for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]); i++)
		if (!strcmp(text, choices[i].name)) {
			*(unsigned *)value = choices[i].frames;
			return NULL;
		}
	return "expected requests, answers or all";
}

static const char *read_device(const char *text, void *value)
{
	static const char name[] = "embedded";
	const size_t length = sizeof(name) - 1;
	const char *end;
	uint64_t number;

	if (strncmp(text, name, length) || !read_integer(text + length, &end, &number) || *end)
		return "expected the name of a device, such as embedded1";
	if (number >= (uint64_t)soft_device.inject->hooks->device_count())
		return "device not found; AIORDMA_EMBEDDED_DEVICES sets the number of devices";
	*(uint32_t *)value = 1u << number;
	return NULL;
}

/* ---- the spec ------------------------------------------------------------------------------ */

static const struct {
	const char *name;
	value_parser read;
	size_t offset;
} parts[] = {
	{"seed", read_number, offsetof(struct soft_fault_spec, seed)},
	{"loss", read_schedule, offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_LOSS])},
	{"duplicate", read_schedule,
	 offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_DUPLICATE])},
	{"frames", read_frames, offsetof(struct soft_fault_spec, frames)},
	{"delay", read_time, offsetof(struct soft_fault_spec, delay_ns)},
	{"jitter", read_time, offsetof(struct soft_fault_spec, jitter_ns)},
	{"rate", read_rate, offsetof(struct soft_fault_spec, rate)},
	{"cut", read_schedule, offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_DISCONNECT])},
	{"cut_after", read_bytes, offsetof(struct soft_fault_spec, cut_after)},
	{"rnr", read_schedule, offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_RNR])},
	{"overrun", read_schedule, offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_OVERRUN])},
	{"register", read_schedule,
	 offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_REGISTER])},
	{"handshake", read_schedule,
	 offsetof(struct soft_fault_spec, schedule[SOFT_FAULT_HANDSHAKE])},
	{"qp", read_number32, offsetof(struct soft_fault_spec, qp_num)},
	{"cq", read_number32, offsetof(struct soft_fault_spec, cq)},
	{"device", read_device, offsetof(struct soft_fault_spec, ports)},
};

enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

/* Parse one name=value part. `*seen` has a bit for each entry of `parts` that has appeared. Returns
 * an error message, or NULL on success. */
static const char *read_part(char *part, struct soft_fault_spec *spec, unsigned *seen)
{
	char *value = strchr(part, '=');
	size_t length = value ? (size_t)(value - part) : strlen(part);

	for (unsigned i = 0; i < PARTS; i++)
		if (strlen(parts[i].name) == length && !memcmp(part, parts[i].name, length)) {
			if (!value)
				return "expected a value: name=value";
			if (*seen & 1u << i)
				return "this part appears twice";
			*seen |= 1u << i;
			return parts[i].read(value + 1, (char *)spec + parts[i].offset);
		}
	return "unknown part; expected seed, loss, duplicate, frames, delay, jitter, rate, cut, "
	       "cut_after, rnr, overrun, register, handshake, qp, cq or device";
}

/* Check that the spec contains the faults that its options modify. Returns an error message, or
 * NULL on success. */
static const char *find_unused_part(const struct soft_fault_spec *spec)
{
	const struct soft_fault_schedule *schedule = spec->schedule;

	if (spec->frames != ALL_FRAMES && schedule[SOFT_FAULT_LOSS].probability <= 0 &&
	    schedule[SOFT_FAULT_DUPLICATE].probability <= 0)
		return "frames requires loss or duplicate";
	if (spec->cut_after && schedule[SOFT_FAULT_DISCONNECT].probability <= 0)
		return "cut_after requires cut";
	if (spec->cq && schedule[SOFT_FAULT_OVERRUN].probability <= 0)
		return "cq requires overrun";
	return NULL;
}

int soft_fault_parse(const char *text, struct soft_fault_spec *spec, char *error, size_t size)
{
	char *copy = strdup(text), *rest = copy, *part;
	const char *unused_part;
	unsigned seen = 0;
	int rc = 0;

	*spec = (struct soft_fault_spec){.frames = ALL_FRAMES};
	if (!copy) {
		snprintf(error, size, "out of memory");
		return ENOMEM;
	}
	while (!rc && (part = strsep(&rest, ",")) != NULL) {
		const char *part_error = read_part(part, spec, &seen);

		if (part_error) {
			snprintf(error, size, "'%s': %s", part, part_error);
			rc = EINVAL;
		}
	}
	free(copy);
	if (!rc && (unused_part = find_unused_part(spec)) != NULL) {
		snprintf(error, size, "%s", unused_part);
		rc = EINVAL;
	}
	return rc;
}

int soft_faults_apply_environment(void)
{
	const char *text = getenv(VARIABLE);
	char error[256];

	if (soft_device.inject->environment_applied || soft_faults_set || !text || !*text)
		return 0;
	int rc = soft_fault_parse(text, &soft_faults, error, sizeof(error));

	if (rc)
		return soft_misconfigured(rc, VARIABLE, text, "%s", error);
	soft_device.inject->environment_applied = soft_faults_set = true;
	return 0;
}
