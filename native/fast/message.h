/* What has been received; see message.c. */
#ifndef AIORDMA_FAST_MESSAGE_H
#define AIORDMA_FAST_MESSAGE_H

#include "block.h"

/* Some bytes of a block, and a lease of it. */
struct message {
	PyObject_HEAD
	PyObject *block; /* NULL: released */
	unsigned long long offset;
	unsigned long long length;
	unsigned int imm;
	unsigned int written;
	char has_imm;
	char has_written;
	char last;    /* of its frame, whose receive is then free */
	char fetched; /* it was only offered, and has been read */
};

extern PyTypeObject *fast_message_type;

/* One of the package's class, which takes over a lease of the block: a new reference, or NULL, and
 * the lease is over. */
PyObject *fast_new_message(PyTypeObject *type, struct block *block, unsigned long long offset,
			   unsigned long long length);

int fast_add_message(PyObject *module);

#endif
