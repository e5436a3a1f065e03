/* What a process holds that it has to give back: descriptors, shared memory and threads. */
#pragma once

#include <dirent.h>
#include <poll.h>
#include <stdbool.h>
#include <unistd.h>

#include "cm_check.h"

static inline int entries_of(const char *folder)
{
	DIR *directory = opendir(folder);
	int count = 0;

	CHECK(directory);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

/* Mappings of memory that is shared through a file descriptor. */
static inline int shared_mappings(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int count = 0;

	CHECK(maps);
	while (fgets(line, sizeof(line), maps))
		count += strstr(line, "memfd:") != NULL;
	fclose(maps);
	return count;
}

/* File descriptors, shared mappings and threads of this process, in one number. */
static inline int resources(void)
{
	return (entries_of("/proc/self/fd") + shared_mappings()) * 1000 +
	       entries_of("/proc/self/task");
}

static inline int open_sockets(void)
{
	char name[300], target[64];
	struct dirent *entry;
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	CHECK(dir);
	while ((entry = readdir(dir))) {
		snprintf(name, sizeof(name), "/proc/self/fd/%s", entry->d_name);
		ssize_t n = readlink(name, target, sizeof(target));

		count += n > 6 && !memcmp(target, "socket", 6);
	}
	closedir(dir);
	return count;
}

/* As many descriptors and mappings, and no more threads: one that has been joined is listed for a moment longer,
 * and may have been counted. */
static inline bool as_before(int before)
{
	int now = resources();

	return now / 1000 == before / 1000 && now % 1000 <= before % 1000;
}

/* Within twenty seconds: the last bytes of a stream may be on their way while its ids are gone
 * already. */
static inline void expect_resources(int before)
{
	for (int i = 0; i < 20000 && !as_before(before); i++)
		CHECK_EQUAL(poll(NULL, 0, 1), 0);
	if (!as_before(before))
		CHECK_EQUAL(resources(), before);
}
