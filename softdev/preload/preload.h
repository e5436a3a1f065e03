/* The library that `aiordma run` preloads: the embedded device under the public names of libibverbs
 * and librdmacm, and as the files in /sys and /dev that programs look for.
 *
 *   public.c       exports of the two libraries that are not in abi/calls.h
 *   rsockets.c     the rsockets of librdmacm, which are refused
 *   lookup.c       finds the device's paths in the table of tree.h
 *   answers.c      contents of its files
 *   libc_paths.c   wrappers of C library functions that take paths
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
	NODE_MAJOR = 231, /* same as the kernel's nodes */
	NODE_MINOR = 1000, /* larger than the kernel's minor numbers */
	CM_MINOR = NODE_MINOR + 4, /* after those of all devices */
};

enum {
	TEXT_SIZE = 4096 /* a page, as in sysfs */
};
/* A function that writes the text of a file of device `number` to `text`, which has TEXT_SIZE
 * bytes. `index` is the number in place of # in the path (tree.h). Returns the length of the text
 * without the final null byte, or a negative errno value. */
typedef int answer(char *text, int number, unsigned int index);

enum kind {
	PATH_ELSEWHERE, /* not a path of the device */
	PATH_FOLDER,
	PATH_LINK,
	PATH_NODE,
	PATH_TEXT
};

struct entry {
	enum kind kind;
	const char *path;
	const char *target; /* target of a link, for the first device */
	answer *answer; /* function of a text */
	unsigned int minor; /* minor number of a node */
};

/* The result of looking up a path. */
struct place {
	enum kind kind;
	const struct entry *entry; /* entry of a link, node or text; NULL for other paths */
	int number; /* number of the device */
	unsigned int index; /* index of a text */
	char target[256]; /* target of a link */
	int dirfd; /* directory of `real_path` if it is relative */
	const char *real_path; /* path to pass to the C library if `entry` is NULL */
	char path[512]; /* path without links and dots, as programs see it */
	char folder[1280]; /* path of the directory that replaces a directory of the device */
};

/* Implement every rsockets call by failing with EOPNOTSUPP. The arguments are ignored. The result
 * is -1 for callers that expect an int as well as for those that expect a long. */
long preload_refuse_rsocket(void);
/* Returns the number of devices. */
int preload_devices(void);
/* Returns false if the beginning of the path shows that it does not belong to the device. */
bool preload_may_be_device_path(int dirfd, const char *path);
/* Look up a path. If the path ends with a link and `follow` is true, look up the link's target. */
void preload_look_up(int dirfd, const char *path, bool follow, struct place *place);
/* Remember that the program has opened one of the device's directories. From now on, names relative
 * to a descriptor are looked up as well. */
void preload_remember_opened_directory(void);

#define LINK(path, target)
#define NODE(path, minor)
#define TEXT(path, name) answer answer_##name;
#include "preload/tree.h"
#undef LINK
#undef NODE
#undef TEXT
