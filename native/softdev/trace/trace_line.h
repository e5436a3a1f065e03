/* Building one line of JSON: what a trace does two million times. */
#ifndef AIORDMA_SOFTDEV_TRACE_LINE_H
#define AIORDMA_SOFTDEV_TRACE_LINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct soft_line {
	size_t length;
	char text[4096]; /* more than the longest one */
};

static inline void soft_line_add(struct soft_line *line, const char *text, size_t length)
{
	memcpy(line->text + line->length, text, length);
	line->length += length;
}

static inline void soft_line_number(struct soft_line *line, uint64_t value)
{
	char digits[20];
	size_t at = sizeof(digits);

	do {
		digits[--at] = (char)('0' + value % 10);
		value /= 10;
	} while (value);
	soft_line_add(line, digits + at, sizeof(digits) - at);
}

/* Text from outside, of which at most `most` bytes are taken. */
static inline void soft_line_quoted(struct soft_line *line, const char *text, size_t most)
{
	static const char hex[] = "0123456789abcdef";

	line->text[line->length++] = '"';
	for (; *text && most--; text++) {
		uint8_t byte = (uint8_t)*text;

		if (byte < 0x20 || byte == '"' || byte == '\\' || byte == 0x7f) {
			const char escaped[] = {'\\',           'u',           '0', '0',
						hex[byte >> 4], hex[byte & 15]};

			soft_line_add(line, escaped, sizeof(escaped));
		} else {
			line->text[line->length++] = *text;
		}
	}
	line->text[line->length++] = '"';
}

#define SOFT_LINE_TEXT(line, literal) soft_line_add(line, literal, sizeof(literal) - 1)

/* ,"name":value */
#define SOFT_LINE_NUMBER(line, name, value)                                                        \
	do {                                                                                       \
		SOFT_LINE_TEXT(line, ",\"" name "\":");                                            \
		soft_line_number(line, value);                                                     \
	} while (0)

/* A name that needs no escapes. */
#define SOFT_LINE_NAME(line, name, value)                                                          \
	do {                                                                                       \
		const char *value_ = value;                                                        \
		SOFT_LINE_TEXT(line, ",\"" name "\":\"");                                          \
		soft_line_add(line, value_, strlen(value_));                                       \
		SOFT_LINE_TEXT(line, "\"");                                                        \
	} while (0)

#define SOFT_LINE_QUOTED(line, name, value, most)                                                  \
	do {                                                                                       \
		SOFT_LINE_TEXT(line, ",\"" name "\":");                                            \
		soft_line_quoted(line, value, most);                                               \
	} while (0)

#define SOFT_LINE_TRUE(line, name, condition)                                                      \
	do {                                                                                       \
		if (condition)                                                                     \
			SOFT_LINE_TEXT(line, ",\"" name "\":true");                                \
	} while (0)

#endif
