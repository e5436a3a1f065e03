/* Faults in pages of the application's memory, and checks that they exist with the required
 * rights. */
#include <sys/mman.h>
#include <unistd.h>

#include "objects.h"

#ifndef MADV_POPULATE_READ /* since Linux 5.14; unknown to older C libraries */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

bool soft_pages_can_fault(void)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	/* Try the advice on the stack page that holds this variable. */
	uintptr_t own_page = (uintptr_t)&page & ~(page - 1);

	return madvise((void *)own_page, page, MADV_POPULATE_READ) == 0;
}

int soft_pages_fault(const void *memory, size_t length, bool writable)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t start = (uintptr_t)memory & ~(page - 1);
	uintptr_t end = (uintptr_t)memory + length;

	if (end < (uintptr_t)memory)
		return EINVAL;
	/* The kernel rounds the length up to whole pages. */
	if (madvise((void *)start, end - start,
		    writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
		return 0;
	switch (errno) {
	case EINVAL: /* mapping without the required right, or unsupported advice */
		return soft_pages_can_fault() ? EFAULT : 0;
	case ENOMEM: /* a hole */
	case EFAULT: /* beyond the end of a mapped file */
		return EFAULT; /* as the kernel returns if pinning fails */
	default:
		return errno;
	}
}
