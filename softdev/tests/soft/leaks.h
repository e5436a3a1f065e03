/* Checks for leaked file descriptors, shared memory and threads. */
#pragma once

#include <dirent.h>
#include <poll.h>
#include <stdbool.h>
#include <unistd.h>

#include "cm_check.h"

static inline int count_entries(const char *folder)
{
	DIR *directory = opendir(folder);
	int count = 0;

	CHECK(directory);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

/* Returns the number of memory mappings that are shared through a file descriptor. */
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

/* Returns the number of file descriptors and shared mappings, times 1000, plus the number of
 * threads. */
static inline int count_resources(void)
{
	return (count_entries("/proc/self/fd") + shared_mappings()) * 1000 +
	       count_entries("/proc/self/task");
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

/* Returns whether count_resources() is back at `before`. The number of threads may also be lower, because
 * a joined thread remains listed briefly and may have been counted in `before`. */
static inline bool as_before(int before)
{
	int now = count_resources();

	return now / 1000 == before / 1000 && now % 1000 <= before % 1000;
}

/* Wait up to 20 s for the resources to return to `before`, and fail the test if they do not. The
 * last bytes of a stream may still be in transit after its ids have been destroyed. */
static inline void expect_resources(int before)
{
	for (int i = 0; i < 20000 && !as_before(before); i++)
		CHECK_EQUAL(poll(NULL, 0, 1), 0);
	if (!as_before(before))
		CHECK_EQUAL(count_resources(), before);
}
