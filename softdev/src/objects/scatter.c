/* Converts part of an SGE list to iovecs. Each call checks the keys again, because a key may be
 * invalidated between two chunks of a message. */
#include <sys/uio.h>

#include "objects.h"

int soft_sge_to_iovecs(const struct ibv_pd *pd, const struct ibv_sge *sges, uint32_t num_sge,
		       uint64_t offset, uint32_t length, unsigned rights, struct iovec *iov,
		       int room)
{
	int count = 0;

	for (uint32_t i = 0; i < num_sge && length && count < room; i++) {
		if (offset >= sges[i].length) {
			offset -= sges[i].length;
			continue;
		}
		uint32_t part = sges[i].length - (uint32_t)offset;

		if (part > length)
			part = length;
		void *memory = soft_sge_memory(&sges[i], pd, (uint32_t)offset, part, rights);

		if (!memory)
			return -1;
		iov[count++] = (struct iovec){.iov_base = memory, .iov_len = part};
		length -= part;
		offset = 0;
	}
	return count;
}
