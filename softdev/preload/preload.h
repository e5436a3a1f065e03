/* The library that `aiordma run` preloads: the embedded device under the public names of libibverbs
 * and librdmacm, and as the files of /sys and /dev that programs look for.
 *
 *   public.c       what the two libraries export besides the calls of abi/calls.h
 *   rsockets.c     the rsockets of librdmacm, refused
 *   lookup.c       which paths are the device's: the table of tree.h
 *   answers.c      the texts of its files
 *   libc_paths.c   functions of the C library that take paths, in front of the C library's own
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
	NODE_MAJOR = 231, /* that of the kernel's own nodes */
	NODE_MINOR = 1000, /* more than the kernel comes to: it takes the first one that is free */
	CM_MINOR = NODE_MINOR + 4, /* behind those of all devices */
};

/* The text of a file: its length without the final zero, or a negative errno value. */
enum {
	TEXT_SIZE = 4096 /* a page, as in sysfs */
};
typedef int answer(char *text, int number, unsigned int index);

enum kind {
	PATH_ELSEWHERE, /* not the device's */
	PATH_FOLDER,
	PATH_LINK,
	PATH_NODE,
	PATH_TEXT
};

struct entry {
	enum kind kind;
	const char *path;
	const char *target; /* of a link, as the first device has it */
	answer *answer; /* of a text */
	unsigned int minor; /* of a node */
};

struct place {
	enum kind kind;
	const struct entry *entry; /* of links, nodes and texts */
	int number; /* of the device */
	unsigned int index; /* of a text */
	char target[256]; /* of a link */
	int dirfd; /* of folders, and elsewhere: what the C library gets */
	const char *real;
	char path[512]; /* without links and dots, as programs see it */
	char folder[1280];
};

/* What every call of rsockets does, without a look at its arguments: -1, whose lower half is the -1
 * of a call that returns an int. */
long preload_refuse_rsocket(void);
/* How many there are. */
int preload_devices(void);
/* Whether a path needs a lookup at all: a comparison of its beginning, for all that are elsewhere. */
bool preload_may_be_ours(int dirfd, const char *path);
/* `follow`: a link at the end counts as what it points to. */
void preload_look_up(int dirfd, const char *path, bool follow, struct place *place);
/* A descriptor of one of the folders was given out: names may be relative to it from now on. */
void preload_gave_out_folder(void);

#define LINK(path, target)
#define NODE(path, minor)
#define TEXT(path, name) answer answer_##name;
#include "preload/tree.h"
#undef LINK
#undef NODE
#undef TEXT
