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
enum {
	ENTRIES = sizeof(entries) / sizeof(entries[0]),
	MAX_LINKS = 8,
	MAX_GID_INDEX = 254, /* SOFT_GIDS - 1 */
};

/* The top directories of the table. Some of the files in them may belong to the system. */
static const char *const device_roots[] = {
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

/* Returns whether the path is one of `device_roots` or lies below one. */
static bool is_below_device_roots(const char *path)
{
	for (size_t i = 0; i < sizeof(device_roots) / sizeof(device_roots[0]); i++)
		if (path_after(path, device_roots[i]))
			return true;
	return false;
}

/* ---- relative names -------------------------------------------------------------------------- */

/* whether the program has opened one of the device's directories */
static atomic_bool opened_device_directory;

void preload_remember_opened_directory(void)
{
	atomic_store_explicit(&opened_device_directory, true, memory_order_relaxed);
}

/* The directory that replaces "/": next to this library and without symbolic links, as the kernel
 * names the directories of open descriptors. */
static char tree_root[512];

/* Set `tree_root` to the directory "tree" next to this library. It stays empty if there is none. */
__attribute__((constructor)) static void find_tree_root(void)
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

/* Convert a name relative to the open directory `dirfd` to the absolute path that the program knows
 * it by. Returns false if this directory does not replace one of the device's directories. */
static bool make_absolute(int dirfd, const char *path, char *absolute, size_t size)
{
	char self[32], folder[4096];
	const char *rest;
	ssize_t length;

	if (dirfd < 0 || !atomic_load_explicit(&opened_device_directory, memory_order_relaxed))
		return false;
	snprintf(self, sizeof(self), "/proc/self/fd/%d", dirfd);
	length = readlink(self, folder, sizeof(folder) - 1);
	if (length <= 0)
		return false;
	folder[length] = '\0';
	rest = *tree_root ? path_after(folder, tree_root) : NULL;
	if (!rest || !*rest)
		return false;
	/* Skip a directory named after the number of devices (tree.py). If there is none, go back to
	 * the slash. */
	while (*++rest >= '0' && *rest <= '9')
		;
	rest -= rest[-1] == '/';
	return (size_t)snprintf(absolute, size, "%s%s%s", rest, *path ? "/" : "", path) < size;
}

bool preload_may_be_device_path(int dirfd, const char *path)
{
	if (!path)
		return false;
	if (path[0] != '/')
		return dirfd >= 0 && *path &&
		       atomic_load_explicit(&opened_device_directory, memory_order_relaxed);
	/* The device only has paths in /sys and /dev, so one letter rules out most other paths. */
	return (path[1] == 's' || path[1] == 'd') && is_below_device_roots(path);
}

/* ---- the walk -------------------------------------------------------------------------------- */

/* The names of devices in paths consist of a prefix and a number, such as "embedded1" and
 * "uverbs1001" for device 1. */
static const struct device_prefix {
	const char *text;
	int first_number; /* the number in the name of device 0 */
} device_prefixes[] = {{"embedded", 0}, {"uverbs", NODE_MINOR}};

enum { ANY_DEVICE = -1 };

/* Returns the prefix if the path component at `name` is a prefix and a digit. Otherwise returns
 * NULL. */
static const struct device_prefix *find_device_prefix(const char *name)
{
	for (size_t i = 0; i < sizeof(device_prefixes) / sizeof(device_prefixes[0]); i++) {
		size_t length = strlen(device_prefixes[i].text);

		if (!strncmp(name, device_prefixes[i].text, length) && name[length] >= '0' &&
		    name[length] <= '9')
			return &device_prefixes[i];
	}
	return NULL;
}

/* Returns the number of the device that the path component at `*name` names, and moves `*name` to
 * the end of the component. Returns -1 if there is no such device, or if the number is followed by
 * other characters or has leading zeros. */
static int parse_device_name(const char **name, const struct device_prefix *prefix)
{
	const char *digits = *name + strlen(prefix->text);
	char *end;
	long device = strtol(digits, &end, 10) - prefix->first_number;

	if ((*end && *end != '/') || (*digits == '0' && end > digits + 1))
		return -1;
	*name = end;
	return device >= 0 && device < preload_devices() ? (int)device : -1;
}

/* Copy a path, and replace all names of device `*from_device` by those of `to_device`. The table
 * contains only paths of device 0, so one of the two is always device 0. If `*from_device` is
 * ANY_DEVICE, the first device name in the path sets it. Returns false if the path contains the
 * name of a different device or an invalid one, or is too long. */
static bool rename_device(const char *from, char *to, size_t size, int *from_device, int to_device)
{
	size_t length = 0;

	while (*from && length + 1 < size) {
		to[length++] = *from++;
		const struct device_prefix *prefix =
			to[length - 1] == '/' ? find_device_prefix(from) : NULL;

		if (!prefix)
			continue;
		int device = parse_device_name(&from, prefix);

		if (*from_device == ANY_DEVICE)
			*from_device = device;
		if (device < 0 || device != *from_device)
			return false;
		length += (size_t)snprintf(to + length, size - length, "%s%d", prefix->text,
					   prefix->first_number + to_device);
	}
	to[length < size ? length : size - 1] = '\0';
	return !*from && length < size;
}

/* Parse an index of the GID table, without leading zeros. Returns false if `text` is not one. */
static bool parse_index(const char *text, unsigned int *index)
{
	char *end;

	if (*text < '0' || *text > '9' || (*text == '0' && text[1]))
		return false;
	unsigned long number = strtoul(text, &end, 10);

	if (*end || number > MAX_GID_INDEX)
		return false;
	*index = (unsigned int)number;
	return true;
}

/* Find the table's entry for a path of the first device. In an entry's path, # matches any index.
 * Store this index in `index`, or 0 if the entry does not contain #. */
static const struct entry *find_first_device_entry(const char *path, unsigned int *index)
{
	*index = 0;
	for (int i = 0; i < ENTRIES; i++) {
		const char *pattern = strchr(entries[i].path, '#');
		size_t length = pattern ? (size_t)(pattern - entries[i].path) : 0;

		if (pattern ? !strncmp(path, entries[i].path, length) &&
				      parse_index(path + length, index)
			    : !strcmp(path, entries[i].path))
			return &entries[i];
	}
	return NULL;
}

/* Find the table's entry for a path of any device, and the number of this device. The number is 0
 * if the path contains no device name. */
static const struct entry *find_entry(const char *path, int *number, unsigned int *index)
{
	char first_device_path[sizeof(((struct place *)0)->path)];

	*number = ANY_DEVICE;
	if (!is_below_device_roots(path) ||
	    !rename_device(path, first_device_path, sizeof(first_device_path), number, 0))
		return NULL;
	if (*number == ANY_DEVICE)
		*number = 0;
	return find_first_device_entry(first_device_path, index);
}

/* Returns whether the path is a directory of the device. The table does not list directories, but
 * the entries below them. */
static bool is_device_directory(const char *path)
{
	char first_device_path[sizeof(((struct place *)0)->path)];
	int number = ANY_DEVICE;

	if (!is_below_device_roots(path) ||
	    !rename_device(path, first_device_path, sizeof(first_device_path), &number, 0))
		return false;
	for (int i = 0; i < ENTRIES; i++) {
		const char *rest = path_after(entries[i].path, first_device_path);

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
	int first_device = 0;

	rename_device(link->target, target, size, &first_device, number);
}

/* Append a component to a path, or remove the last one for "..". Returns true and sets `target` if
 * the result is a link. Sets `use_resolved_path` if ".." leaves one of the device's directories,
 * because the system may lack this directory and cannot resolve the original path then. */
static bool append_component(char *path, size_t size, const char *name, size_t length,
			     bool *use_resolved_path, char *target, size_t target_size)
{
	int number;
	unsigned int index;
	const struct entry *entry;
	char *slash;

	if (length == 1 && name[0] == '.')
		return false;
	if (length == 2 && name[0] == '.' && name[1] == '.') {
		slash = strrchr(path, '/');
		*use_resolved_path |= is_device_directory(path);
		if (slash)
			*slash = '\0';
		return false;
	}
	append(path, size, name, length);
	entry = find_entry(path, &number, &index);
	if (!entry || entry->kind != PATH_LINK)
		return false;
	find_target(entry, number, target, target_size);
	return true;
}

/* Resolve dots and the device's links, and store the result in place->path. Sets
 * `use_resolved_path` if the system cannot resolve the original name, because it lacks the device's
 * files. Returns false if the path is too long or has too many links. */
static bool walk(const char *name, bool follow, struct place *place, bool *use_resolved_path)
{
	char todo[sizeof(place->path)];
	char rest[sizeof(todo)];
	int links = 0;

	if (strlen(name) >= sizeof(todo))
		return false;
	strcpy(todo, name);
	for (char *at = todo; *(at += strspn(at, "/"));) {
		size_t length = strcspn(at, "/");
		bool link =
			append_component(place->path, sizeof(place->path), at, length,
					 use_resolved_path, place->target, sizeof(place->target));

		at += length;
		if (!link || (!*at && !follow))
			continue;
		/* Go on with the link's target, which is relative to the link's directory. */
		strcpy(rest, at);
		*strrchr(place->path, '/') = '\0';
		*use_resolved_path = true;
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
	bool use_resolved_path = false;

	*place = (struct place){.kind = PATH_ELSEWHERE, .real_path = name, .dirfd = dirfd};
	if (name[0] != '/') {
		if (!make_absolute(dirfd, name, absolute, sizeof(absolute)))
			return;
		name = absolute;
		use_resolved_path = true;
	}
	if (!walk(name, follow, place, &use_resolved_path))
		return;
	place->entry = find_entry(place->path, &place->number, &place->index);
	if (place->entry) {
		place->kind = place->entry->kind;
		if (place->kind == PATH_LINK)
			find_target(place->entry, place->number, place->target,
				    sizeof(place->target));
	} else if (*tree_root && is_device_directory(place->path)) {
		char device_count[16] = "";

		/* The roots list all devices, so they exist once for each number of devices. */
		for (size_t i = 0; i < sizeof(device_roots) / sizeof(device_roots[0]); i++)
			if (!strcmp(place->path, device_roots[i]))
				snprintf(device_count, sizeof(device_count), "/%d",
					 preload_devices());
		snprintf(place->folder, sizeof(place->folder), "%s%s%s", tree_root, device_count,
			 place->path);
		place->kind = PATH_FOLDER;
		place->real_path = place->folder;
	} else if (use_resolved_path) {
		place->real_path = place->path;
	} /* Otherwise, pass the original name on. Its dots may follow links of the system. */
}
