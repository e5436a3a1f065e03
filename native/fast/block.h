/* Blocks of a memory pool, and the cache of free ones; see block.c. */
#ifndef AIORDMA_FAST_BLOCK_H
#define AIORDMA_FAST_BLOCK_H

#include "fast.h"

/* A place in registered memory, made once and leased many times. */
struct block {
	struct pinned pinned;
	PyObject *pool; /* its shelf */
	unsigned long long address;
	unsigned long long size;
	unsigned int lkey;
	unsigned int posted; /* bytes, while it is a posted receive */
	Py_ssize_t views;    /* of users */
};

enum {
	SHELVES = 64
};

/* Free blocks, by their size, a power of two. */
struct shelf {
	PyObject_HEAD
	PyObject *ready[SHELVES];  /* lists; NULL: none yet */
	PyObject *before;    /* internal requests that wait, sized */
	PyObject *others;    /* users' requests that wait, sized */
	unsigned long long leases; /* blocks that are not here */
	unsigned long long leased_bytes;
	unsigned long long in_slabs;   /* of these bytes, those that are not large */
	unsigned long long trim_below; /* when fewer are, Python looks for slabs to give up */
	unsigned long long slab_size;  /* a larger block is large */
	unsigned long long ready_bytes; /* of each size, at most */
	unsigned int smallest;
	unsigned int everything; /* a key for all memory of the process, to be sent from; or 0 */
	char closed;
};

extern PyTypeObject *fast_block_type;
extern PyTypeObject *fast_shelf_type;

/* A leased block of at least so many bytes for a moment: a new reference.  NULL without an exception
 * when it is for Python to make one, or to wait. */
struct block *fast_take_block(struct shelf *shelf, unsigned long long size);

/* One lease less, one pin less. */
PyObject *fast_settle_block(struct block *block);

/* The end of a lease; what is raised is reported. */
void fast_release_block(struct block *block);

/* What a user sees of it: a memoryview. */
PyObject *fast_block_view(struct block *block, unsigned long long start, unsigned long long stop);

/* Where it lies. */
static inline unsigned char *fast_block_bytes(const struct block *block)
{
	return (unsigned char *)(uintptr_t)block->address;
}

int fast_add_block(PyObject *module);

#endif
