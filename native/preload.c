/* The embedded device under the system libraries' names, for LD_PRELOAD: `aiordma run`.
 *
 * A shared library of its own is made of native/softdev and this file.  The linker gives every
 * function of calls.h the public name of the call (preload_exports.py), so that the dynamic linker
 * finds it before libibverbs and librdmacm.  Without version information a symbol satisfies every
 * version.  Here is what those libraries export besides, for programs only.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "softdev.h"

#define PUBLIC __attribute__((visibility("default")))

/* ---- GID types, as the kernel's sysfs files tell them --------------------------------------- */

enum sysfs_gid_type {
	SYSFS_IB_ROCE_V1,
	SYSFS_ROCE_V2
};

PUBLIC int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index,
			      enum sysfs_gid_type *type)
{
	struct ibv_gid_entry entry;
	int rc = soft__ibv_query_gid_ex(context, port_num, index, &entry, 0, sizeof(entry));

	if (rc) {
		errno = rc;
		return -1;
	}
	*type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? SYSFS_ROCE_V2 : SYSFS_IB_ROCE_V1;
	return 0;
}

/* ---- sysfs ---------------------------------------------------------------------------------- */

PUBLIC const char *ibv_get_sysfs_path(void)
{
	const char *path = getenv("SYSFS_PATH");

	return path ? path : "/sys";
}

/* The first line of a file: its length, or -1.  The device's own folder has an empty name: there is
 * none, and nothing in it. */
PUBLIC int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
	char path[IBV_SYSFS_PATH_MAX * 2];
	ssize_t length;
	int fd;

	if (!*dir || (size_t)snprintf(path, sizeof(path), "%s/%s", dir, file) >= sizeof(path)) {
		errno = ENOENT;
		return -1;
	}
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	length = read(fd, buf, size);
	close(fd);
	if (length > 0 && buf[length - 1] == '\n')
		buf[--length] = '\0';
	else if (length >= 0 && (size_t)length < size)
		buf[length] = '\0';
	return (int)length;
}

/* ---- memory --------------------------------------------------------------------------------- */

PUBLIC struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				      int access)
{
	return soft_ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

/* The device reaches memory through the process's own page tables: a fork harms nothing. */
PUBLIC int ibv_dontfork_range(void *base, size_t size)
{
	(void)base;
	(void)size;
	return 0;
}

PUBLIC int ibv_dofork_range(void *base, size_t size)
{
	(void)base;
	(void)size;
	return 0;
}

/* ---- Ethernet ------------------------------------------------------------------------------- */

/* The device's packets have no Ethernet header. */
PUBLIC int ibv_resolve_eth_l2_from_gid(struct ibv_context *context, struct ibv_ah_attr *attr,
				       uint8_t eth_mac[6], uint16_t *vid)
{
	(void)context;
	(void)attr;
	(void)eth_mac;
	(void)vid;
	errno = EOPNOTSUPP;
	return -1;
}

/* ---- rsockets ------------------------------------------------------------------------------- */

/* librdmacm's work on its own insides, which the ids here do not have: told at the first call. */
PUBLIC int rsocket(int domain, int type, int protocol)
{
	(void)domain;
	(void)type;
	(void)protocol;
	errno = EOPNOTSUPP;
	return -1;
}
