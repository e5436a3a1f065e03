/* Reading a trace: its lines, and the fields of a line. */
#ifndef AIORDMA_TESTS_TRACE_SIDE_H
#define AIORDMA_TESTS_TRACE_SIDE_H

#include "verbs_side.h"

enum {
	MOST_LINES = 100000
};

struct trace {
	char *text;
	size_t size; /* of the file */
	size_t count;
	char *lines[MOST_LINES]; /* without their newlines */
};

static inline void read_trace(struct trace *trace, const char *path)
{
	FILE *file = fopen(path, "r");

	CHECK(file);
	CHECK_EQUAL(fseek(file, 0, SEEK_END), 0);
	trace->size = (size_t)ftell(file);
	rewind(file);
	CHECK(trace->text = calloc(1, trace->size + 1));
	CHECK_EQUAL(fread(trace->text, 1, trace->size, file), trace->size);
	fclose(file);
	trace->count = 0;
	for (char *line = trace->text; *line;) {
		char *end = strchr(line, '\n');

		CHECK(trace->count < MOST_LINES);
		trace->lines[trace->count++] = line;
		if (!end)
			break;
		*end = '\0';
		line = end + 1;
	}
}

static inline void forget_trace(struct trace *trace)
{
	free(trace->text);
}

/* Where the field's value begins, or NULL. */
static inline const char *field(const char *line, const char *name)
{
	char quoted[64];

	snprintf(quoted, sizeof(quoted), "\"%s\":", name);
	const char *at = strstr(line, quoted);

	return at ? at + strlen(quoted) : NULL;
}

static inline uint64_t number(const char *line, const char *name)
{
	const char *value = field(line, name);

	if (!value) {
		fprintf(stderr, "in %s: no %s in %s\n", current_step, name, line);
		exit(1);
	}
	return strtoull(value, NULL, 10);
}

static inline bool is(const char *line, const char *name, const char *expected)
{
	const char *value = field(line, name);
	size_t length = strlen(expected);

	return value && value[0] == '"' && !strncmp(value + 1, expected, length) &&
	       value[1 + length] == '"';
}

static inline bool is_type(const char *line, const char *type)
{
	return is(line, "type", type);
}

/* A path in a new folder, which the caller removes with drop_folder. */
static inline const char *new_folder(char folder[64])
{
	snprintf(folder, 64, "/tmp/aiordma-trace-XXXXXX");
	CHECK(mkdtemp(folder));
	return folder;
}

static inline void start_trace(const char *path)
{
	char used[256];

	CHECK_EQUAL(aiordma_trace_start(path, used, sizeof(used)), 0);
	CHECK(!strcmp(path, used));
}

#endif
