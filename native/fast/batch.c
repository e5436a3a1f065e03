/* Collects the reads and writes of a batch: the common case.
 *
 * The base of aiordma/_transport/batch.py, whose `_write` and `_read` take the same arguments and are
 * called for all other cases.  A batch of 64 makes 64 calls, and a Python method that only asked the run
 * took a fifth of the whole batch.
 */
#include "run.h"

struct batch {
	PyObject_HEAD
	PyObject *transfer; /* a run, inside the scope; None, or NULL */
};

static PyObject *str_write, *str_read;

static PyObject *for_python(PyObject *self, PyObject *name, PyObject *const *args, Py_ssize_t count,
			    PyObject *names)
{
	PyObject *method = PyObject_GetAttr(self, name);
	PyObject *positional = PyTuple_New(count), *keywords = PyDict_New(), *done = NULL;
	bool failed = !method || !positional || !keywords;

	for (Py_ssize_t i = 0; !failed && i < count; i++)
		failed = PyTuple_SetItem(positional, i, Py_NewRef(args[i])) != 0;
	for (Py_ssize_t i = 0; !failed && names && i < PyTuple_Size(names); i++)
		failed = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + i]) != 0;
	if (!failed)
		done = PyObject_Call(method, positional, keywords);
	Py_XDECREF(method);
	Py_XDECREF(positional);
	Py_XDECREF(keywords);
	return done;
}

static PyObject *add(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names,
		     bool is_read)
{
	PyObject *transfer = ((struct batch *)self)->transfer;
	int rc = 0;

	if (count == 2 && !names && transfer && PyObject_TypeCheck(transfer, fast_run_type))
		rc = fast_add_transfer((struct run *)transfer, args[is_read], args[!is_read],
				       is_read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE);
	if (rc < 0)
		return NULL;
	return rc ? Py_NewRef(Py_None)
		  : for_python(self, is_read ? str_read : str_write, args, count, names);
}

static PyObject *batch_write(PyObject *self, PyObject *const *args, Py_ssize_t count,
			     PyObject *names)
{
	return add(self, args, count, names, false);
}

static PyObject *batch_read(PyObject *self, PyObject *const *args, Py_ssize_t count,
			    PyObject *names)
{
	return add(self, args, count, names, true);
}

static int batch_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct batch *)self)->transfer);
	return 0;
}

static int batch_clear(PyObject *self)
{
	Py_CLEAR(((struct batch *)self)->transfer);
	return 0;
}

static void batch_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	batch_clear(self);
	fast_free(self);
}

static PyMemberDef batch_members[] = {
	{"_transfer", T_OBJECT, offsetof(struct batch, transfer), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef batch_methods[] = {
	{"write", (PyCFunction)(void (*)(void))batch_write, METH_FASTCALL | METH_KEYWORDS,
	 "write($self, source, target)\n--\n\n"
	 "As `Connection.write`, done when the scope has ended."},
	{"read", (PyCFunction)(void (*)(void))batch_read, METH_FASTCALL | METH_KEYWORDS,
	 "read($self, source, target)\n--\n\n"
	 "As `Connection.read`; the bytes are there when the scope has ended."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot batch_slots[] = {
	{Py_tp_doc, "Operations that are collected."},
	{Py_tp_members, batch_members},
	{Py_tp_methods, batch_methods},
	{Py_tp_traverse, batch_traverse},
	{Py_tp_clear, batch_clear},
	{Py_tp_dealloc, batch_dealloc},
	{0, NULL},
};

static PyType_Spec batch_spec = {
	.name = "aiordma._native._fast.Batch",
	.basicsize = sizeof(struct batch),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = batch_slots,
};

int fast_add_batch(PyObject *module)
{
	str_write = PyUnicode_InternFromString("_write");
	str_read = PyUnicode_InternFromString("_read");
	if (!str_write || !str_read)
		return -1;
	return fast_add_type(module, &batch_spec) ? 0 : -1;
}
