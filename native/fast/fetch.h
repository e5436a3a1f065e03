/* Messages that were offered, and how they are read; see incoming.c and fetch.c. */
#ifndef AIORDMA_FAST_FETCH_H
#define AIORDMA_FAST_FETCH_H

#include "traffic.h"

/* What was offered, in its place in the order of arrival, until it is read. */
struct incoming {
	PyObject_HEAD
	PyObject *message; /* it is read into: or NULL */
	PyObject *landing; /* the target that it is read into instead; or NULL */
	struct offer offer;
	unsigned int reads_left;
	char started;
};

/* One RDMA READ of it. */
struct fetch {
	struct work work;
	PyObject *inbox;
	PyObject *incoming;
	PyObject *pinned; /* the memory, until the device has let go of it; then NULL */
};

extern PyTypeObject *fast_incoming_type;
extern PyTypeObject *fast_fetch_type;

/* A new reference, or NULL. */
struct incoming *fast_new_incoming(const struct offer *offer);

/* The offer of the next message: it is read at once, if that is plain.  -1 with an exception. */
int fast_offered(struct traffic *traffic, struct incoming *incoming);

/* The read has completed.  -1 with an exception. */
int fast_fetch_done(struct fetch *fetch);

int fast_add_incoming(PyObject *module);
int fast_add_fetch(PyObject *module);

#endif
