/* Blocks of registered memory, and the cache of free ones.
 *
 * A block is free when it is not leased, no work request is under way on it and no view of it exists:
 * the views that users get are exports of the block, so it counts them itself.
 *
 * The base of aiordma/mr_pool.py, which makes blocks, keeps the limit and the requests that wait.  This
 * file leases a cached block while no request waits.
 */
#include "block.h"

PyTypeObject *fast_block_type, *fast_shelf_type;

/* ---- the shelf --------------------------------------------------------------------------------- */

static unsigned int shelf_of(const struct shelf *shelf, unsigned long long size)
{
	if (size <= shelf->smallest)
		size = shelf->smallest;
	return size > 1 ? 64 - (unsigned int)__builtin_clzll(size - 1) : 0;
}

static struct block *take(struct shelf *shelf, unsigned long long size)
{
	unsigned int which = shelf_of(shelf, size);
	PyObject *ready = which < SHELVES ? shelf->ready[which] : NULL;
	Py_ssize_t count = ready ? PyList_Size(ready) : 0;

	if (!count)
		return NULL;
	struct block *block = (struct block *)PyList_GetItem(ready, count - 1);

	Py_INCREF((PyObject *)block);
	if (PyList_SetSlice(ready, count - 1, count, NULL)) {
		Py_DECREF((PyObject *)block);
		return NULL;
	}
	return block;
}

/* Until it comes back, a block has a reference that the collector of cycles does not know of.  Else it
 * would clear a block whose views are garbage, and these would bring it back as nothing.
 */
static void leased(struct shelf *shelf, struct block *block)
{
	Py_INCREF((PyObject *)block);
	block->pinned.leases++;
	shelf->leases++;
	shelf->leased_bytes += block->size;
	if (block->size <= shelf->slab_size)
		shelf->in_slabs += block->size;
}

static bool has_waiters(PyObject *waiting)
{
	return waiting && PyObject_Size(waiting) > 0;
}

struct block *fast_take_block(struct shelf *shelf, unsigned long long size)
{
	if (size > shelf->slab_size || has_waiters(shelf->before) || has_waiters(shelf->others))
		return NULL;
	struct block *block = take(shelf, size);

	if (block)
		leased(shelf, block);
	return block;
}

/* 1: it stands here again.  0: there are enough.  -1: an exception. */
static int keep(struct shelf *shelf, struct block *block)
{
	unsigned int which = shelf_of(shelf, block->size);

	if (which >= SHELVES)
		return 0;
	if (!shelf->ready[which]) {
		shelf->ready[which] = PyList_New(0);
		if (!shelf->ready[which])
			return -1;
	}
	PyObject *ready = shelf->ready[which];
	unsigned long long count = (unsigned long long)PyList_Size(ready);

	if (count && (count + 1) * block->size > shelf->ready_bytes)
		return 0;
	return PyList_Append(ready, (PyObject *)block) ? -1 : 1;
}

static PyObject *come_back(struct shelf *shelf, struct block *block)
{
	shelf->leases--;
	shelf->leased_bytes -= block->size;
	if (block->size <= shelf->slab_size)
		shelf->in_slabs -= block->size;
	bool plain = !shelf->closed && block->size <= shelf->slab_size &&
		     shelf->in_slabs >= shelf->trim_below && !has_waiters(shelf->before) &&
		     !has_waiters(shelf->others);
	int rc = plain ? keep(shelf, block) : 0;
	PyObject *done = NULL;

	if (rc == 0)
		done = PyObject_CallMethod((PyObject *)shelf, "_returned", "O", block);
	else if (rc > 0)
		done = Py_NewRef(Py_None);
	Py_DECREF((PyObject *)block);
	return done;
}

static PyObject *shelf_take(PyObject *self, PyObject *argument)
{
	struct shelf *shelf = (struct shelf *)self;
	unsigned long long size = PyLong_AsUnsignedLongLong(argument);
	struct block *block = PyErr_Occurred() ? NULL : take(shelf, size);

	if (block) {
		leased(shelf, block);
		return (PyObject *)block;
	}
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *shelf_lease(PyObject *self, PyObject *block)
{
	if (!PyObject_TypeCheck(block, fast_block_type)) {
		PyErr_SetString(PyExc_TypeError, "a block is leased");
		return NULL;
	}
	leased((struct shelf *)self, (struct block *)block);
	Py_RETURN_NONE;
}

static PyObject *shelf_keep(PyObject *self, PyObject *block)
{
	struct shelf *shelf = (struct shelf *)self;

	if (!PyObject_TypeCheck(block, fast_block_type)) {
		PyErr_SetString(PyExc_TypeError, "a block is kept");
		return NULL;
	}
	int rc = keep(shelf, (struct block *)block);

	return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static PyObject *shelf_clear_ready(PyObject *self, PyObject *unused)
{
	struct shelf *shelf = (struct shelf *)self;
	PyObject *all = PyList_New(0);

	(void)unused;
	for (int i = 0; all && i < SHELVES; i++) {
		PyObject *ready = shelf->ready[i];
		Py_ssize_t count = PyList_Size(all);

		if (!ready)
			continue;
		shelf->ready[i] = NULL;
		int rc = PyList_SetSlice(all, count, count, ready);
		Py_DECREF(ready);
		if (rc)
			Py_CLEAR(all);
	}
	return all;
}

static int shelf_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct shelf *shelf = (struct shelf *)self;

	Py_VISIT(Py_TYPE(self));
	for (int i = 0; i < SHELVES; i++)
		Py_VISIT(shelf->ready[i]);
	Py_VISIT(shelf->before);
	Py_VISIT(shelf->others);
	return 0;
}

static int shelf_clear(PyObject *self)
{
	struct shelf *shelf = (struct shelf *)self;

	for (int i = 0; i < SHELVES; i++)
		Py_CLEAR(shelf->ready[i]);
	Py_CLEAR(shelf->before);
	Py_CLEAR(shelf->others);
	return 0;
}

static void shelf_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	shelf_clear(self);
	fast_free(self);
}

static PyMemberDef shelf_members[] = {
	{"before", T_OBJECT, offsetof(struct shelf, before), 0, NULL},
	{"others", T_OBJECT, offsetof(struct shelf, others), 0, NULL},
	{"leases", T_ULONGLONG, offsetof(struct shelf, leases), READONLY, NULL},
	{"leased_bytes", T_ULONGLONG, offsetof(struct shelf, leased_bytes), READONLY, NULL},
	{"in_slabs", T_ULONGLONG, offsetof(struct shelf, in_slabs), READONLY, NULL},
	{"trim_below", T_ULONGLONG, offsetof(struct shelf, trim_below), 0, NULL},
	{"slab_size", T_ULONGLONG, offsetof(struct shelf, slab_size), 0, NULL},
	{"ready_bytes", T_ULONGLONG, offsetof(struct shelf, ready_bytes), 0, NULL},
	{"smallest", T_UINT, offsetof(struct shelf, smallest), 0, NULL},
	{"everything", T_UINT, offsetof(struct shelf, everything), 0, NULL},
	{"closed", T_BOOL, offsetof(struct shelf, closed), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef shelf_methods[] = {
	{"take", shelf_take, METH_O, NULL},
	{"lease_block", shelf_lease, METH_O, NULL},
	{"keep", shelf_keep, METH_O, NULL},
	{"clear_ready", shelf_clear_ready, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot shelf_slots[] = {
	{Py_tp_doc, "Blocks that are ready."},
	{Py_tp_members, shelf_members},
	{Py_tp_methods, shelf_methods},
	{Py_tp_traverse, shelf_traverse},
	{Py_tp_clear, shelf_clear},
	{Py_tp_dealloc, shelf_dealloc},
	{0, NULL},
};

static PyType_Spec shelf_spec = {
	.name = "aiordma._native._fast.Shelf",
	.basicsize = sizeof(struct shelf),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = shelf_slots,
};

/* ---- the block --------------------------------------------------------------------------------- */

PyObject *fast_settle_block(struct block *block)
{
	if (block->pinned.pins || block->pinned.leases || block->views)
		Py_RETURN_NONE;
	if (!block->pool || !PyObject_TypeCheck(block->pool, fast_shelf_type))
		Py_RETURN_NONE; /* it is garbage, as its pool is */
	return come_back((struct shelf *)block->pool, block);
}

/* In the middle of anything, perhaps with an exception on its way. */
static void settle_quietly(struct block *block)
{
	PyObject *type, *value, *traceback;

	PyErr_Fetch(&type, &value, &traceback);
	PyObject *done = fast_settle_block(block);
	if (!done)
		PyErr_WriteUnraisable((PyObject *)block);
	Py_XDECREF(done);
	PyErr_Restore(type, value, traceback);
}

void fast_release_block(struct block *block)
{
	block->pinned.leases--;
	settle_quietly(block);
}

PyObject *fast_block_view(struct block *block, unsigned long long start, unsigned long long stop)
{
	PyObject *whole = PyMemoryView_FromObject((PyObject *)block);
	PyObject *part =
		whole ? PySequence_GetSlice(whole, (Py_ssize_t)start, (Py_ssize_t)stop) : NULL;

	Py_XDECREF(whole);
	return part;
}

static PyObject *block_export(PyObject *self, PyObject *args)
{
	unsigned long long start, stop;

	if (!PyArg_ParseTuple(args, "KK", &start, &stop))
		return NULL;
	return fast_block_view((struct block *)self, start, stop);
}

static int block_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
	struct block *block = (struct block *)self;
	int rc = PyBuffer_FillInfo(view, self, fast_block_bytes(block), (Py_ssize_t)block->size, 0,
				   flags);

	if (!rc)
		block->views++;
	return rc;
}

static void block_releasebuffer(PyObject *self, Py_buffer *view)
{
	struct block *block = (struct block *)self;

	(void)view;
	if (--block->views == 0)
		settle_quietly(block);
}

static int block_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct block *)self)->pool);
	return 0;
}

static int block_clear(PyObject *self)
{
	Py_CLEAR(((struct block *)self)->pool);
	return 0;
}

static void block_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	block_clear(self);
	fast_free(self);
}

static PyMemberDef block_members[] = {
	{"pool", T_OBJECT, offsetof(struct block, pool), 0, NULL},
	{"address", T_ULONGLONG, offsetof(struct block, address), 0, NULL},
	{"size", T_ULONGLONG, offsetof(struct block, size), 0, NULL},
	{"lkey", T_UINT, offsetof(struct block, lkey), 0, NULL},
	{"posted", T_UINT, offsetof(struct block, posted), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef block_methods[] = {
	{"export", block_export, METH_VARARGS,
	 "A view for a user; while it exists the block is not free."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot block_slots[] = {
	{Py_tp_doc, "A place in registered memory."},
	{Py_tp_members, block_members},
	{Py_tp_methods, block_methods},
	{Py_bf_getbuffer, block_getbuffer},
	{Py_bf_releasebuffer, block_releasebuffer},
	{Py_tp_traverse, block_traverse},
	{Py_tp_clear, block_clear},
	{Py_tp_dealloc, block_dealloc},
	{0, NULL},
};

static PyType_Spec block_spec = {
	.name = "aiordma._native._fast.Block",
	.basicsize = sizeof(struct block),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = block_slots,
};

int fast_add_block(PyObject *module)
{
	fast_block_type = fast_add_subtype(module, &block_spec, fast_pinned_type);
	fast_shelf_type = fast_block_type ? fast_add_type(module, &shelf_spec) : NULL;
	return fast_shelf_type ? 0 : -1;
}
