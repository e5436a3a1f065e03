/* Helpers that read a trace file and find the fields of its lines. */
#pragma once

#include "verbs_side.h"

enum { MOST_LINES = 100000 };

/* the trace read by the last read_trace() call */
static struct {
	char *text;
	size_t size; /* size of the file in bytes */
	size_t count;
	char *lines[MOST_LINES]; /* lines without their newlines */
} trace;

static inline void read_trace(const char *path)
{
	FILE *file = fopen(path, "r");

	free(trace.text);
	CHECK(file);
	CHECK_OK(fseek(file, 0, SEEK_END));
	trace.size = (size_t)ftell(file);
	rewind(file);
	CHECK(trace.text = calloc(1, trace.size + 1));
	CHECK_EQUAL(fread(trace.text, 1, trace.size, file), trace.size);
	fclose(file);
	trace.count = 0;
	for (char *line = trace.text; *line;) {
		char *end = strchr(line, '\n');

		CHECK(trace.count < MOST_LINES);
		trace.lines[trace.count++] = line;
		if (!end)
			break;
		*end = '\0';
		line = end + 1;
	}
}

/* Returns the start of a field's value, or NULL if the line lacks the field. */
static inline const char *field(const char *line, const char *name)
{
	char quoted[64];

	snprintf(quoted, sizeof(quoted), "\"%s\":", name);
	const char *at = strstr(line, quoted);

	return at ? at + strlen(quoted) : NULL;
}

static inline uint64_t number_field(const char *line, const char *name)
{
	const char *value = field(line, name);

	if (!value) {
		fprintf(stderr, "in %s: no %s in %s\n", current_step, name, line);
		exit(1);
	}
	return strtoull(value, NULL, 10);
}

static inline bool field_is(const char *line, const char *name, const char *expected)
{
	const char *value = field(line, name);
	size_t length = strlen(expected);

	return value && value[0] == '"' && !strncmp(value + 1, expected, length) &&
	       value[1 + length] == '"';
}

static inline bool is_type(const char *line, const char *type)
{
	return field_is(line, "type", type);
}

/* Returns the number of lines of the given type whose field `name` has the given value. */
static inline size_t count_of(const char *type, const char *name, const char *value)
{
	size_t count = 0;

	for (size_t i = 0; i < trace.count; i++)
		count += is_type(trace.lines[i], type) && field_is(trace.lines[i], name, value);
	return count;
}

static inline size_t count_type(const char *type)
{
	return count_of(type, "type", type);
}

/*
 * Find the next line of a type, starting at index *at, and set *at to the index after it.
 * Returns NULL if no such line remains.
 */
static inline const char *next_of(const char *type, size_t *at)
{
	while (*at < trace.count)
		if (is_type(trace.lines[(*at)++], type))
			return trace.lines[*at - 1];
	return NULL;
}

/* Loop over all lines of a type. The body sees each one as `line`. */
#define EACH_LINE(type)                                                                            \
	for (size_t at_ = 0; at_ < trace.count;)                                                   \
		for (const char *line = next_of(type, &at_); line; line = NULL)

static inline bool has_end_line(void)
{
	const char *last = trace.lines[trace.count - 1];

	return is_type(last, "end") && !field(last, "error");
}

/* Create an empty temporary folder. Returns its path, which is stored in `folder`. */
static inline const char *new_folder(char folder[64])
{
	snprintf(folder, 64, "/tmp/aiordma-trace-XXXXXX");
	CHECK(mkdtemp(folder));
	return folder;
}

static inline void start_trace(const char *path)
{
	char used[256];

	CHECK_OK(aiordma_trace_start(path, used, sizeof(used)));
	CHECK(!strcmp(path, used));
}

/*
 * Read the trace at `path`. Returns its first record of a packet dropped for queue pair `qp_num`
 * and the given reason, or NULL if there is none yet.
 */
static inline const char *find_drop(const char *path, uint32_t qp_num, const char *reason)
{
	read_trace(path);
	EACH_LINE ("dropped")
		if (field_is(line, "reason", reason) && field(line, "qp_num") &&
		    number_field(line, "qp_num") == qp_num)
			return line;
	return NULL;
}

static inline const char *expect_drop(const char *path, uint32_t qp_num, const char *reason)
{
	const char *line;

	while (!(line = find_drop(path, qp_num, reason)))
		sched_yield();
	return line;
}
