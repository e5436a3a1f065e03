/* Exports of libibverbs and librdmacm that are not in abi/calls.h, for programs only.
 *
 * The linker gives every function of calls.h the public name of its call (exports.py), so that the
 * dynamic linker finds it before those libraries. exports.txt lists the missing calls.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cm/cm.h"
#include "preload.h"
#include "softdev.h"

/* ---- GID types, as the kernel's sysfs files tell them --------------------------------------- */

enum sysfs_gid_type { SYSFS_IB_ROCE_V1, SYSFS_ROCE_V2 };

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

/* ---- the port ------------------------------------------------------------------------------- */

/* Returns the speed in units of 100 Mb/s (ibv_query_port_speed(3)): four lanes of 50 Gb/s, as in
 * ibv_query_port. */
PUBLIC int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *speed)
{
	(void)context;
	if (port_num != 1)
		return EINVAL;
	*speed = 4 * 500;
	return 0;
}

/* ---- sysfs ---------------------------------------------------------------------------------- */

PUBLIC const char *ibv_get_sysfs_path(void)
{
	const char *path = getenv("SYSFS_PATH");

	return path ? path : "/sys";
}

/* Set the file names in the device structures. Without this library, the devices have no files
 * (tree.h). Also keep the devices open as librdmacm does, because programs depend on it: libfabric
 * creates queue pairs after rdma_free_devices(3). */
__attribute__((constructor)) static void set_up(void)
{
	int count = 0;
	struct ibv_device **list = soft_ibv_get_device_list(&count);

	soft_cm_keep_device(true);
	for (int i = 0; i < count; i++) {
		struct ibv_device *device = list[i];

		sprintf(device->dev_name, "uverbs%d", NODE_MINOR + i);
		sprintf(device->dev_path, "/sys/class/infiniband_verbs/uverbs%d", NODE_MINOR + i);
		sprintf(device->ibdev_path, "/sys/class/infiniband/embedded%d", i);
	}
	soft_ibv_free_device_list(list);
}

/* Read a file as a null-terminated string without its final newline. Returns the length of the
 * string, or -1. It is also an error if `buf` has no room for the null byte, because the caller
 * would read beyond the buffer. */
PUBLIC int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size)
{
	char path[IBV_SYSFS_PATH_MAX * 2];
	ssize_t length;
	int fd;

	if ((size_t)snprintf(path, sizeof(path), "%s/%s", dir, file) >= sizeof(path)) {
		errno = ENAMETOOLONG;
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
	else
		length = -1;
	return (int)length;
}

/* ---- memory --------------------------------------------------------------------------------- */

PUBLIC struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				      int access)
{
	return soft_ibv_reg_mr_iova2(pd, addr, length, iova, (unsigned int)access);
}

/* Same as in rdma-core 64. */
struct ibv_buf {
	struct ibv_pd *pd;
	void *addr;
	size_t size;
};

enum {
	REG_IOVA = 1 << 0,
	REG_ADDR = 1 << 1,
	REG_FD = 1 << 2,
	REG_FD_OFFSET = 1 << 3,
	REG_BUF = 1 << 5,
	REG_KNOWN = REG_IOVA | REG_ADDR | REG_FD | REG_FD_OFFSET | REG_BUF, /* no DMA handles */
};

struct ibv_mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	struct ibv_buf *buf;
};

PUBLIC void *ibv_alloc_buf(struct ibv_pd *pd, size_t size, struct ibv_buf **buf)
{
	struct ibv_buf made = {.pd = pd, .size = size};
	struct ibv_buf *handle = malloc(sizeof(*handle));

	/* Do not share pages with other data, because madvise(2) and fork(2) affect whole pages. */
	made.addr =
		size ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
		     : MAP_FAILED;
	if (!handle || made.addr == MAP_FAILED) {
		if (made.addr != MAP_FAILED)
			munmap(made.addr, size);
		free(handle);
		errno = size ? ENOMEM : EINVAL;
		return NULL;
	}
	*handle = made;
	*buf = handle;
	return made.addr;
}

PUBLIC void ibv_free_buf(struct ibv_buf *buf)
{
	munmap(buf->addr, buf->size);
	free(buf);
}

/* Returns whether `attr` asks to register a range of this buffer, in the buffer's own PD. */
static bool is_of_buffer(const struct ibv_buf *buf, const struct ibv_pd *pd,
			 const struct ibv_mr_init_attr *attr)
{
	uint64_t offset = (uintptr_t)attr->addr - (uintptr_t)buf->addr;

	return pd == buf->pd && (attr->comp_mask & REG_ADDR) &&
	       !(attr->comp_mask & (REG_FD | REG_FD_OFFSET)) && offset <= buf->size &&
	       attr->length <= buf->size - offset;
}

/* ibv_reg_mr_ex of ibv_reg_mr(3) */
PUBLIC struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *attr)
{
	uint64_t mask = attr->comp_mask;
	uint64_t iova = mask & REG_IOVA ? attr->iova : (uintptr_t)attr->addr;

	errno = 0;
	if (mask & ~(uint64_t)REG_KNOWN)
		errno = EOPNOTSUPP;
	else if (!(mask & (REG_ADDR | REG_FD)) || (mask & REG_ADDR && mask & REG_FD) ||
		 (mask & REG_BUF && !is_of_buffer(attr->buf, pd, attr)))
		errno = EINVAL;
	if (errno)
		return NULL;
	if (mask & REG_ADDR)
		return soft_ibv_reg_mr_iova2(pd, attr->addr, attr->length, iova,
					     (unsigned int)attr->access);
	return soft_ibv_reg_dmabuf_mr(pd, mask & REG_FD_OFFSET ? attr->fd_offset : 0, attr->length,
				      mask & REG_IOVA ? attr->iova : 0, attr->fd, attr->access);
}

PUBLIC struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, struct ibv_buf *buf, void *addr,
				     size_t length, int access)
{
	struct ibv_mr_init_attr attr = {
		.length = length,
		.access = access,
		.comp_mask = REG_ADDR | REG_BUF,
		.addr = addr,
		.buf = buf,
	};

	return ibv_reg_mr_ex(pd, &attr);
}

/* The device accesses memory through the process's page tables, so a fork does not affect it. */
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

/* ---- texts ---------------------------------------------------------------------------------- */

PUBLIC const char *ibv_wr_opcode_str(enum ibv_wr_opcode opcode)
{
	static const char *const texts[] = {
		[IBV_WR_RDMA_WRITE] = "RDMA write",
		[IBV_WR_RDMA_WRITE_WITH_IMM] = "RDMA write with immediate",
		[IBV_WR_SEND] = "send",
		[IBV_WR_SEND_WITH_IMM] = "send with immediate",
		[IBV_WR_RDMA_READ] = "RDMA read",
		[IBV_WR_ATOMIC_CMP_AND_SWP] = "atomic compare and swap",
		[IBV_WR_ATOMIC_FETCH_AND_ADD] = "atomic fetch and add",
		[IBV_WR_LOCAL_INV] = "local invalidate",
		[IBV_WR_BIND_MW] = "bind memory window",
		[IBV_WR_SEND_WITH_INV] = "send with invalidate",
	};

	if ((unsigned int)opcode >= sizeof(texts) / sizeof(texts[0]) || !texts[opcode])
		return "unknown";
	return texts[opcode];
}

/* ---- providers' libraries ------------------------------------------------------------------- */

/* A libibverbs variable that providers read. libibverbs sets it from the application's
 * environment. */
PUBLIC bool verbs_allow_disassociate_destroy = false;

/* Tells aiordma itself that these are not the system's libraries (verbs/system.c). */
PUBLIC const char aiordma_run = 1;
