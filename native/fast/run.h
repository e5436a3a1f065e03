/* Many one-sided requests as one; see run.c. */
#ifndef AIORDMA_FAST_RUN_H
#define AIORDMA_FAST_RUN_H

#include "fast.h"

/* The arrays have `room` entries; a run of one, the most frequent, has them within itself. */
struct run {
	PyObject_HEAD
	PyObject *user;   /* what remote memory must be for */
	PyObject *waiter; /* a future, or what does as one; or NULL */
	uint8_t kind;   /* of operation */
	char partial;   /* what is left of the run tells the waiter that it is done */
	uint32_t count;
	uint32_t posted;
	uint32_t room;
	struct aiordma_send *sends;
	struct ibv_sge *sges;
	PyObject **pins; /* NULL entries: let go */
	struct aiordma_send one_send;
	struct ibv_sge one_sge;
	PyObject *one_pin;
};

extern PyTypeObject *fast_run_type;

/* A new reference, or NULL with MemoryError. */
struct run *fast_new_run(PyObject *user, uint8_t kind);

/* 1: it was allowed, and is the next request.  0: it is for Python to say why not, or to cut it into
 * pieces.  -1: an exception. */
int fast_add_transfer(struct run *run, PyObject *here, PyObject *there, enum ibv_wr_opcode opcode);

/* Gives its requests their wr_ids and flags, and the last one the signal. */
void fast_number_run(struct run *run, uint64_t wr_id);

/* All has been done: a new reference to None, or NULL with what the waiter raises. */
PyObject *fast_finish_run(struct run *run);

#endif
