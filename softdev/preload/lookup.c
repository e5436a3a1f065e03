/* Finds the device's paths in /sys and /dev (tree.h), and the directories that replace its
 * directories.
 *
 * Only paths that literally begin like those in the table are examined. A program that uses another
 * way (a directory that it changed to, a link of its own) gets what the system has.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "preload.h"

#define DEVICE "/sys/devices/virtual/aiordma/embedded0"

static const struct entry entries[] = {
#define LINK(path, target) {PATH_LINK, path, target, NULL, 0},
#define NODE(path, minor) {PATH_NODE, path, NULL, NULL, minor},
#define TEXT(path, name) {PATH_TEXT, path, NULL, answer_##name, 0},
#include "preload/tree.h"
#undef LINK
#undef NODE
#undef TEXT
};
enum { ENTRIES = sizeof(entries) / sizeof(entries[0]), MAX_LINKS = 8 };

/* The top directories of the table. Some of the files in them may belong to the system. */
static const char *const roots[] = {
	"/sys/class/infiniband",
	"/sys/class/infiniband_verbs",
	"/dev/infiniband",
	"/sys/devices/virtual/aiordma",
};

/* Returns the part of `path` that follows `folder`. It is empty or starts with a slash. Returns
 * NULL if the path is not in this directory. */
static const char *path_after(const char *path, const char *folder)
{
	size_t length = strlen(folder);

	if (strncmp(path, folder, length) || (path[length] && path[length] != '/'))
		return NULL;
	return path + length;
}

static bool is_below_roots(const char *path)
{
	for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++)
		if (path_after(path, roots[i]))
			return true;
	return false;
}

/* ---- relative names -------------------------------------------------------------------------- */

static atomic_bool gave_out_folder;

void preload_gave_out_folder(void)
{
	atomic_store_explicit(&gave_out_folder, true, memory_order_relaxed);
}

/* The directory that replaces "/": next to this library and without symbolic links, as the kernel
 * names the directories of open descriptors. */
static char tree_root[512];

__attribute__((constructor)) static void find_top(void)
{
	char folder[PATH_MAX], real[PATH_MAX];
	const char *slash;
	Dl_info info;

	if (!dladdr(tree_root, &info) || !info.dli_fname ||
	    !(slash = strrchr(info.dli_fname, '/')) ||
	    (size_t)(slash - info.dli_fname) >= sizeof(folder) - sizeof("/tree"))
		return;
	snprintf(folder, sizeof(folder), "%.*s/tree", (int)(slash - info.dli_fname),
		 info.dli_fname);
	if (realpath(folder, real) && strlen(real) < sizeof(tree_root))
		strcpy(tree_root, real);
}

/* Convert a name relative to one of our directories to an absolute path. */
static bool make_absolute(int dirfd, const char *path, char *absolute, size_t size)
{
	char self[32], folder[4096];
	const char *rest;
	ssize_t length;

	if (dirfd < 0 || !atomic_load_explicit(&gave_out_folder, memory_order_relaxed))
		return false;
	snprintf(self, sizeof(self), "/proc/self/fd/%d", dirfd);
	length = readlink(self, folder, sizeof(folder) - 1);
	if (length <= 0)
		return false;
	folder[length] = '\0';
	rest = *tree_root ? path_after(folder, tree_root) : NULL;
	if (!rest || !*rest)
		return false;
	while (*++rest >= '0' && *rest <= '9') /* the directory for this number of devices */
		;
	rest -= rest[-1] == '/';
	return (size_t)snprintf(absolute, size, "%s%s%s", rest, *path ? "/" : "", path) < size;
}

bool preload_may_be_ours(int dirfd, const char *path)
{
	if (!path)
		return false;
	if (path[0] != '/')
		return dirfd >= 0 && *path &&
		       atomic_load_explicit(&gave_out_folder, memory_order_relaxed);
	return (path[1] == 's' || path[1] == 'd') && is_below_roots(path);
}

/* ---- the walk -------------------------------------------------------------------------------- */

/* Replace the names of device `*number` in a path by those of device `new_number`. If `*number` is
 * negative, it is set from the first name. Returns false if the path names different devices. */
static bool rename_device(const char *from, char *to, size_t size, int *number, int new_number)
{
	static const struct {
		const char *name;
		int first;
	} names[] = {{"/embedded", 0}, {"/uverbs", NODE_MINOR}};
	size_t length = 0;

	while (*from && length + 1 < size) {
		to[length++] = *from++;
		for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
			size_t skip = strlen(names[i].name) - 1;
			char *end;

			if (to[length - 1] != '/' || strncmp(from, names[i].name + 1, skip) ||
			    from[skip] < '0' || from[skip] > '9')
				continue;
			long found = strtol(from + skip, &end, 10) - names[i].first;

			if (*number < 0 && found >= 0 && found < preload_devices())
				*number = (int)found;
			if ((*end && *end != '/') || found != *number || found < 0 ||
			    (from[skip] == '0' && end > from + skip + 1))
				return false;
			length += (size_t)snprintf(to + length, size - length, "%s%d",
						   names[i].name + 1, names[i].first + new_number);
			from = end;
			break;
		}
	}
	to[length < size ? length : size - 1] = '\0';
	return !*from && length < size;
}

/* Find the entry for a path of the first device. In an entry's path, # matches any index. Store
 * this index in `index`, or 0 if the entry does not contain #. */
static const struct entry *entry_of_first(const char *path, unsigned int *index)
{
	*index = 0;
	for (int i = 0; i < ENTRIES; i++) {
		const char *pattern = strchr(entries[i].path, '#');
		size_t length = pattern ? (size_t)(pattern - entries[i].path) : 0;
		char *end;

		if (!pattern ? !strcmp(path, entries[i].path)
			     : !strncmp(path, entries[i].path, length)) {
			if (!pattern)
				return &entries[i];
			if (path[length] < '0' || path[length] > '9' ||
			    (path[length] == '0' && path[length + 1]))
				continue;
			unsigned long number = strtoul(path + length, &end, 10);

			if (*end || number > 254)
				continue;
			*index = (unsigned int)number;
			return &entries[i];
		}
	}
	return NULL;
}

/* Find the entry with a path for any device. */
static const struct entry *entry_at(const char *path, int *number, unsigned int *index)
{
	char first[sizeof(((struct place *)0)->path)];

	*number = -1;
	if (!is_below_roots(path) || !rename_device(path, first, sizeof(first), number, 0))
		return NULL;
	*number = *number < 0 ? 0 : *number;
	return entry_of_first(first, index);
}

static bool is_folder(const char *whole)
{
	char path[sizeof(((struct place *)0)->path)];
	int number = -1;

	if (!is_below_roots(whole) || !rename_device(whole, path, sizeof(path), &number, 0))
		return false;
	for (int i = 0; i < ENTRIES; i++) {
		const char *rest = path_after(entries[i].path, path);

		if (rest && *rest)
			return true;
	}
	return false;
}

static void append(char *path, size_t size, const char *name, size_t length)
{
	size_t at = strlen(path);

	if (at + 1 + length < size)
		snprintf(path + at, size - at, "/%.*s", (int)length, name);
}

/* Get the target of a link for the device with this number. */
static void find_target(const struct entry *link, int number, char *target, size_t size)
{
	int first = 0;

	rename_device(link->target, target, size, &first, number);
}

/* Append a component to a path, or remove the last one for "..". Returns true and sets `target` if
 * the result is a link. Sets `changed` if ".." leaves one of our directories, because the system
 * may lack this directory and cannot resolve the original path then. */
static bool append_component(char *path, size_t size, const char *name, size_t length,
			     bool *changed, char *target, size_t target_size)
{
	int number;
	unsigned int index;
	const struct entry *entry;
	char *slash;

	if (length == 1 && name[0] == '.')
		return false;
	if (length == 2 && name[0] == '.' && name[1] == '.') {
		slash = strrchr(path, '/');
		*changed |= is_folder(path);
		if (slash)
			*slash = '\0';
		return false;
	}
	append(path, size, name, length);
	entry = entry_at(path, &number, &index);
	if (!entry || entry->kind != PATH_LINK)
		return false;
	find_target(entry, number, target, target_size);
	return true;
}

/* Resolve dots and the links of the table, and store the result in place->path. Returns false if
 * the path is too long or has too many links. */
static bool walk(const char *name, bool follow, struct place *place, bool *changed)
{
	char todo[sizeof(place->path)];
	char rest[sizeof(todo)];
	int links = 0;

	if (strlen(name) >= sizeof(todo))
		return false;
	strcpy(todo, name);
	for (char *at = todo; *(at += strspn(at, "/"));) {
		size_t length = strcspn(at, "/");
		bool link = append_component(place->path, sizeof(place->path), at, length, changed,
					     place->target, sizeof(place->target));

		at += length;
		if (!link || (!*at && !follow))
			continue;
		strcpy(rest, at);
		*strrchr(place->path, '/') = '\0';
		*changed = true;
		if (++links > MAX_LINKS || (size_t)snprintf(todo, sizeof(todo), "%s%s",
							    place->target, rest) >= sizeof(todo))
			return false;
		at = todo;
	}
	if (!*place->path)
		strcpy(place->path, "/");
	return true;
}

void preload_look_up(int dirfd, const char *name, bool follow, struct place *place)
{
	char absolute[sizeof(place->path)];
	bool changed = false;

	*place = (struct place){.kind = PATH_ELSEWHERE, .real = name, .dirfd = dirfd};
	if (name[0] != '/') {
		if (!make_absolute(dirfd, name, absolute, sizeof(absolute)))
			return;
		name = absolute;
		changed = true;
	}
	if (!walk(name, follow, place, &changed))
		return;
	place->entry = entry_at(place->path, &place->number, &place->index);
	if (place->entry) {
		place->kind = place->entry->kind;
		if (place->kind == PATH_LINK)
			find_target(place->entry, place->number, place->target,
				    sizeof(place->target));
	} else if (*tree_root && is_folder(place->path)) {
		char listing[16] = "";

		for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++)
			if (!strcmp(place->path, roots[i]))
				snprintf(listing, sizeof(listing), "/%d", preload_devices());
		snprintf(place->folder, sizeof(place->folder), "%s%s%s", tree_root, listing,
			 place->path);
		place->kind = PATH_FOLDER;
		place->real = place->folder;
	} else if (changed) {
		place->real = place->path;
	} /* unchanged, because its dots may follow links of the system */
}
