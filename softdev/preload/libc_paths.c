/* Wrappers of C library functions that take paths. They answer for the device's paths in /sys and
 * /dev (lookup.c) and pass all other calls on.
 *
 * Files in /sys are created when they are opened, as sealed memory (memfd_create(2)), or as a pipe
 * if that is denied. Directories are those next to this library, so a process leaves nothing
 * behind. The node in /dev can be examined, but opening it fails with ENXIO, like a node without a
 * driver, because this library implements its calls.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* 64 would redirect names, such as open to open64 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "preload.h"

_Static_assert(sizeof(off_t) == 8 && sizeof(struct stat) == sizeof(struct stat64),
	       "the names with 64 are the same functions");

/* Functions that this library overrides. `next` points to the original definitions in the C library
 * or a sanitizer, and a constructor sets it before main() starts. */
#define FUNCTIONS(EACH)                                                                            \
	EACH(access)                                                                               \
	EACH(euidaccess)                                                                           \
	EACH(faccessat)                                                                            \
	EACH(fopen)                                                                                \
	EACH(fstatat)                                                                              \
	EACH(getxattr)                                                                             \
	EACH(glob)                                                                                 \
	EACH(lgetxattr)                                                                            \
	EACH(openat)                                                                               \
	EACH(opendir)                                                                              \
	EACH(readlinkat)                                                                           \
	EACH(realpath)                                                                             \
	EACH(scandir)                                                                              \
	EACH(statx)

#define DECLARE(name) __typeof__(name) *name;
static struct {
	FUNCTIONS(DECLARE)
} next;

#define FIND(name) next.name = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);
__attribute__((constructor)) static void find_next(void){FUNCTIONS(FIND)}

/* Look up the functions first if a constructor of another library calls a wrapper before
 * find_next() has run. */
#define NEXT(name) (next.name ? next.name : (find_next(), next.name))

static int fail(int error)
{
	errno = error;
	return -1;
}

/* Look up `path` if it begins like a path of the device, and return whether it was looked up. If
 * the result is not a file of the device, the caller passes place->dirfd and place->real_path to
 * the C library. */
static bool look_up_if_plausible(int dirfd, const char *path, bool follow, struct place *place)
{
	if (!preload_may_be_device_path(dirfd, path))
		return false;
	preload_look_up(dirfd, path, follow, place);
	return true;
}

/* Returns whether the path leads to a link, node or text that this library answers for. Directories
 * of the device exist as real directories. */
static bool is_device_file(const struct place *place)
{
	return place->entry != NULL;
}

/* Code that several functions share must not call public names, which may belong to another
 * preloaded library. */

/* ---- stat ------------------------------------------------------------------------------------ */

/* Returns the st_mode of a link, node or text in the table. */
static mode_t mode_of(const struct place *place)
{
	switch (place->kind) {
	case PATH_LINK:
		return S_IFLNK | 0777;
	case PATH_NODE:
		return S_IFCHR | 0666;
	default:
		return S_IFREG | 0444;
	}
}

static off_t size_of(const struct place *place)
{
	switch (place->kind) {
	case PATH_LINK:
		return (off_t)strlen(place->target);
	case PATH_TEXT:
		return TEXT_SIZE; /* sysfs also reports a page for every file */
	default:
		return 0;
	}
}

/* Returns a number that no other entry has. */
static ino_t inode_of(const struct place *place)
{
	return (ino_t)(uintptr_t)place->entry + place->index + ((ino_t)place->number << 48);
}

static int fill_stat(const struct place *place, struct stat *status)
{
	*status = (struct stat){
		.st_mode = mode_of(place),
		.st_size = size_of(place),
		.st_ino = inode_of(place),
		.st_nlink = 1,
		.st_blksize = TEXT_SIZE,
	};
	if (place->kind == PATH_NODE)
		status->st_rdev =
			makedev(NODE_MAJOR, place->entry->minor + (unsigned int)place->number);
	return 0;
}

static int stat_at(int dirfd, const char *path, struct stat *status, int flags)
{
	struct place place;

	if (!look_up_if_plausible(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), &place))
		return NEXT(fstatat)(dirfd, path, status, flags);
	if (is_device_file(&place))
		return fill_stat(&place, status);
	return NEXT(fstatat)(place.dirfd, place.real_path, status, flags);
}

PUBLIC int fstatat(int dirfd, const char *path, struct stat *status, int flags)
{
	return stat_at(dirfd, path, status, flags);
}

PUBLIC int stat(const char *path, struct stat *status)
{
	return stat_at(AT_FDCWD, path, status, 0);
}

PUBLIC int lstat(const char *path, struct stat *status)
{
	return stat_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

/* Replaces fstatat() in programs built with glibc before 2.33. `version` is the version of struct
 * stat. */
PUBLIC int __fxstatat(int version, int dirfd, const char *path, struct stat *status, int flags)
{
	(void)version;
	return stat_at(dirfd, path, status, flags);
}

PUBLIC int __xstat(int version, const char *path, struct stat *status)
{
	(void)version;
	return stat_at(AT_FDCWD, path, status, 0);
}

PUBLIC int __lxstat(int version, const char *path, struct stat *status)
{
	(void)version;
	return stat_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

PUBLIC int statx(int dirfd, const char *path, int flags, unsigned int mask, struct statx *status)
{
	struct place place;

	if (!look_up_if_plausible(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), &place))
		return NEXT(statx)(dirfd, path, flags, mask, status);
	if (!is_device_file(&place))
		return NEXT(statx)(place.dirfd, place.real_path, flags, mask, status);
	*status = (struct statx){
		.stx_mask = STATX_TYPE | STATX_MODE | STATX_NLINK | STATX_UID | STATX_GID |
			    STATX_SIZE | STATX_INO,
		.stx_mode = (unsigned short)mode_of(&place),
		.stx_size = (unsigned long long)size_of(&place),
		.stx_ino = inode_of(&place),
		.stx_nlink = 1,
		.stx_blksize = TEXT_SIZE,
	};
	if (place.kind == PATH_NODE) {
		status->stx_rdev_major = NODE_MAJOR;
		status->stx_rdev_minor = place.entry->minor + (unsigned int)place.number;
	}
	return 0;
}

/* ---- access ---------------------------------------------------------------------------------- */

static int access_at(int dirfd, const char *path, int mode, int flags)
{
	struct place place;

	if (!look_up_if_plausible(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), &place))
		return NEXT(faccessat)(dirfd, path, mode, flags);
	if (!is_device_file(&place))
		return NEXT(faccessat)(place.dirfd, place.real_path, mode, flags);
	if ((mode & X_OK) || ((mode & W_OK) && place.kind != PATH_NODE))
		return fail(EACCES);
	return 0;
}

PUBLIC int faccessat(int dirfd, const char *path, int mode, int flags)
{
	return access_at(dirfd, path, mode, flags);
}

PUBLIC int access(const char *path, int mode)
{
	if (!preload_may_be_device_path(AT_FDCWD, path))
		return NEXT(access)(path, mode);
	return access_at(AT_FDCWD, path, mode, 0);
}

PUBLIC int euidaccess(const char *path, int mode)
{
	if (!preload_may_be_device_path(AT_FDCWD, path))
		return NEXT(euidaccess)(path, mode);
	return access_at(AT_FDCWD, path, mode, AT_EACCESS);
}

PUBLIC int eaccess(const char *path, int mode)
{
	return euidaccess(path, mode);
}

/* Fail with `error` if the path is a file of the device. These files do not have extended
 * attributes, but `ls -l` asks for them. Returns 0 for any other path, and the caller then calls
 * the C library with place->real_path, which is left unchanged if the path is not looked up. */
static ssize_t fail_if_device_file(const char *path, bool follow, int error, struct place *place)
{
	return look_up_if_plausible(AT_FDCWD, path, follow, place) && is_device_file(place)
		       ? fail(error)
		       : 0;
}

PUBLIC ssize_t getxattr(const char *path, const char *name, void *value, size_t size)
{
	struct place place = {.real_path = path};

	return fail_if_device_file(path, true, ENODATA, &place)
		       ?: NEXT(getxattr)(place.real_path, name, value, size);
}

PUBLIC ssize_t lgetxattr(const char *path, const char *name, void *value, size_t size)
{
	struct place place = {.real_path = path};

	return fail_if_device_file(path, false, ENODATA, &place)
		       ?: NEXT(lgetxattr)(place.real_path, name, value, size);
}

/* ---- open ------------------------------------------------------------------------------------ */

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* since Linux 6.3; the sysctl vm.memfd_noexec may require it */
#endif

/* Create memory that can be sealed. Kernels before 6.3 reject MFD_NOEXEC_SEAL with EINVAL. */
static int create_memfd(const char *name, unsigned int close_on_exec)
{
	int fd = memfd_create(name, MFD_NOEXEC_SEAL | close_on_exec);

	return fd < 0 && errno == EINVAL ? memfd_create(name, MFD_ALLOW_SEALING | close_on_exec)
					 : fd;
}

/* Write the text to a pipe. Used if memfd_create fails, because a seccomp filter may deny it. The
 * text can be read only once. Returns the read end, or -1 with errno set. */
static int open_pipe(const char *text, size_t length, int close_on_exec)
{
	int ends[2];

	if (pipe2(ends, close_on_exec))
		return -1;
	/* An empty pipe has room for a page. */
	if (write(ends[1], text, length) != (ssize_t)length) {
		close(ends[0]);
		ends[0] = fail(EIO);
	}
	close(ends[1]);
	return ends[0];
}

/* Open a sysfs file of the device. Its text is generated now and sealed against changes. Returns a
 * descriptor to read it from, or -1 with errno set. */
static int open_text(const struct place *place, int flags)
{
	const char *name = strrchr(place->path, '/') + 1;
	char text[TEXT_SIZE];
	int length, fd;

	if (flags & O_DIRECTORY)
		return fail(ENOTDIR);
	if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC))
		return fail(EACCES);
	length = place->entry->answer(text, place->number, place->index);
	if (length < 0)
		return fail(-length);
	fd = create_memfd(name, flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	if (fd < 0)
		return open_pipe(text, (size_t)length, flags & O_CLOEXEC);
	if (write(fd, text, (size_t)length) != length || lseek(fd, 0, SEEK_SET) ||
	    fchmod(fd, mode_of(place) & 0777) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)) {
		int error = errno;

		close(fd);
		return fail(error);
	}
	return fd;
}

static int open_at(int dirfd, const char *path, int flags, mode_t mode)
{
	struct place place;
	int fd;

	if (!look_up_if_plausible(dirfd, path, !(flags & O_NOFOLLOW), &place))
		return NEXT(openat)(dirfd, path, flags, mode);
	switch (place.kind) {
	case PATH_TEXT:
		return open_text(&place, flags);
	case PATH_NODE:
		return fail(ENXIO); /* the error of a node without a driver */
	case PATH_LINK:
		return fail(ELOOP);
	default:
		fd = NEXT(openat)(place.dirfd, place.real_path, flags, mode);
		if (fd >= 0 && place.kind == PATH_FOLDER)
			preload_remember_opened_directory();
		return fd;
	}
}

static mode_t mode_argument(int flags, va_list arguments)
{
	return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

PUBLIC int open(const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_argument(flags, arguments);
	va_end(arguments);
	return open_at(AT_FDCWD, path, flags, mode);
}

PUBLIC int openat(int dirfd, const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_argument(flags, arguments);
	va_end(arguments);
	return open_at(dirfd, path, flags, mode);
}

/* Used with _FORTIFY_SOURCE when no file is created. */
PUBLIC int __open_2(const char *path, int flags);
PUBLIC int __open_2(const char *path, int flags)
{
	return open_at(AT_FDCWD, path, flags, 0);
}

PUBLIC int __openat_2(int dirfd, const char *path, int flags);
PUBLIC int __openat_2(int dirfd, const char *path, int flags)
{
	return open_at(dirfd, path, flags, 0);
}

static FILE *open_stream(const struct place *place, const char *mode)
{
	FILE *stream;
	int fd;

	if (place->kind == PATH_NODE || strpbrk(mode, "wa+")) {
		errno = place->kind == PATH_NODE ? ENXIO : EACCES;
		return NULL;
	}
	fd = open_text(place, strchr(mode, 'e') ? O_CLOEXEC : 0);
	stream = fd < 0 ? NULL : fdopen(fd, mode);
	if (!stream && fd >= 0)
		close(fd);
	return stream;
}

PUBLIC FILE *fopen(const char *path, const char *mode)
{
	struct place place;

	if (!look_up_if_plausible(AT_FDCWD, path, true, &place))
		return NEXT(fopen)(path, mode);
	return is_device_file(&place) ? open_stream(&place, mode)
				      : NEXT(fopen)(place.real_path, mode);
}

/* ---- folders --------------------------------------------------------------------------------- */

/* Returns the path of the directory to open. For a directory of the device, this is its copy next
 * to this library. Returns NULL and sets errno to ENOTDIR if the path is a file of the device. */
static const char *folder_path(const char *path, struct place *place)
{
	if (!look_up_if_plausible(AT_FDCWD, path, true, place))
		return path;
	if (is_device_file(place)) {
		errno = ENOTDIR;
		return NULL;
	}
	if (place->kind == PATH_FOLDER)
		preload_remember_opened_directory();
	return place->real_path;
}

PUBLIC DIR *opendir(const char *path)
{
	struct place place;
	const char *real = folder_path(path, &place);

	return real ? NEXT(opendir)(real) : NULL;
}

PUBLIC int scandir(const char *path, struct dirent ***list, int (*filter)(const struct dirent *),
		   int (*compare)(const struct dirent **, const struct dirent **))
{
	struct place place;
	const char *real = folder_path(path, &place);

	return real ? NEXT(scandir)(real, list, filter, compare) : -1;
}

static void close_folder(void *folder)
{
	closedir(folder);
}

/* Let the C library use our functions to walk directories. */
PUBLIC int glob(const char *pattern, int flags, int (*on_error)(const char *, int), glob_t *found)
{
	if ((flags & GLOB_ALTDIRFUNC) ||
	    (strncmp(pattern, "/sys/", 5) && strncmp(pattern, "/dev/", 5)))
		return NEXT(glob)(pattern, flags, on_error, found);
	found->gl_opendir = (void *(*)(const char *))opendir;
	found->gl_readdir = (struct dirent * (*)(void *)) readdir;
	found->gl_closedir = close_folder;
	found->gl_stat = stat;
	found->gl_lstat = lstat;
	return NEXT(glob)(pattern, flags | GLOB_ALTDIRFUNC, on_error, found);
}

/* ---- links ----------------------------------------------------------------------------------- */

static ssize_t read_link_at(int dirfd, const char *path, char *text, size_t size)
{
	struct place place;
	size_t length;

	if (!look_up_if_plausible(dirfd, path, false, &place))
		return NEXT(readlinkat)(dirfd, path, text, size);
	if (!is_device_file(&place))
		return NEXT(readlinkat)(place.dirfd, place.real_path, text, size);
	if (place.kind != PATH_LINK || !size)
		return fail(EINVAL);
	length = strlen(place.target);
	if (length > size)
		length = size;
	memcpy(text, place.target, length);
	return (ssize_t)length;
}

PUBLIC ssize_t readlinkat(int dirfd, const char *path, char *text, size_t size)
{
	return read_link_at(dirfd, path, text, size);
}

PUBLIC ssize_t readlink(const char *path, char *text, size_t size)
{
	return read_link_at(AT_FDCWD, path, text, size);
}

PUBLIC ssize_t __readlink_chk(const char *path, char *text, size_t size, size_t room);
PUBLIC ssize_t __readlink_chk(const char *path, char *text, size_t size, size_t room)
{
	return read_link_at(AT_FDCWD, path, text, size < room ? size : room);
}

PUBLIC ssize_t __readlinkat_chk(int dirfd, const char *path, char *text, size_t size, size_t room);
PUBLIC ssize_t __readlinkat_chk(int dirfd, const char *path, char *text, size_t size, size_t room)
{
	return read_link_at(dirfd, path, text, size < room ? size : room);
}

PUBLIC char *realpath(const char *path, char *resolved)
{
	struct place place;

	if (!look_up_if_plausible(AT_FDCWD, path, true, &place))
		return NEXT(realpath)(path, resolved);
	if (place.kind == PATH_ELSEWHERE)
		return NEXT(realpath)(place.real_path, resolved);
	return resolved ? strcpy(resolved, place.path) : strdup(place.path);
}

PUBLIC char *__realpath_chk(const char *path, char *resolved, size_t room);
PUBLIC char *__realpath_chk(const char *path, char *resolved, size_t room)
{
	(void)room; /* the caller has checked for PATH_MAX */
	return realpath(path, resolved);
}

PUBLIC char *canonicalize_file_name(const char *path)
{
	return realpath(path, NULL);
}
