/* The part of the fast path that is Python objects: what a one-sided request is made of, and many
 * requests as one object.  Limited API, one interpreter, under the GIL: no locks of its own.
 */
#ifndef AIORDMA_FAST_H
#define AIORDMA_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>

#include "verbs/boundary.h"

/* In a wr_id: not the last of its run, so it completes only if it fails. */
#define AIORDMA_EARLIER ((uint64_t)1 << 31)

/* The longest single request. */
#define AIORDMA_TRANSFER_SIZE ((uint64_t)8 << 20)

/* Memory that is handed out again when it is neither leased nor pinned. */
struct pinned {
	PyObject_HEAD
	Py_ssize_t pins; /* requests under way on it */
	Py_ssize_t leases; /* how many hold it */
};

/* Registered memory of this process, or a slice of it. */
struct local {
	PyObject_HEAD
	unsigned long long address;
	unsigned long long length;
	unsigned int lkey;
	char writable;
	char gone;   /* of the root: released, closed */
	PyObject *pinned; /* of the root */
	PyObject *root;   /* what it was sliced from; NULL: it is one */
};

/* Memory of the peer, or a slice of it. */
struct remote {
	PyObject_HEAD
	unsigned long long address;
	unsigned long long length;
	unsigned int rkey;
	unsigned int rights;
	char usable; /* of the root */
	PyObject *user; /* of the root: the connection that may use it */
	PyObject *root;
};

/* One work request of one piece of memory. */
struct work {
	PyObject_HEAD
	unsigned int kind;
	unsigned int opcode;
	unsigned long long address;
	unsigned int length;
	unsigned int lkey;
	unsigned long long remote_address;
	unsigned int rkey;
	unsigned int imm;
	struct ibv_sge more; /* a second piece, if it has a length */
};

extern PyTypeObject *fast_work_type;
extern PyTypeObject *fast_pinned_type;
extern PyTypeObject *fast_local_type;
extern PyTypeObject *fast_remote_type;

/* Each makes its types and adds them to the module: 0, or -1 with an exception. */
int fast_add_memory(PyObject *module);
int fast_add_run(PyObject *module);
int fast_add_batch(PyObject *module);
int fast_add_work(PyObject *module);

/* A type from its spec, as a member of the module: a borrowed reference, or NULL. */
PyTypeObject *fast_add_type(PyObject *module, PyType_Spec *spec);
/* The same of one that has a base. */
PyTypeObject *fast_add_subtype(PyObject *module, PyType_Spec *spec, PyTypeObject *base);

/* For tp_new: 0, or -1 with an exception if there are any. */
int fast_no_keywords(PyObject *keywords);

/* For tp_dealloc: gives back the memory of an object of a heap type. */
void fast_free(PyObject *object);

/* The root of a slice, itself for what is none. */
struct local *fast_local_root(struct local *local);
struct remote *fast_remote_root(struct remote *remote);

/* What holds registered memory that is there; NULL with the exception of its `_check`. */
struct pinned *fast_pinned_of(struct local *local);

/* One request less is under way; what `_retire` raises is reported, not raised. */
void fast_unpin(PyObject *pinned);

#endif
