/* The memory of a one-sided request: local, remote, and what holds it meanwhile.
 *
 * These are the bases of the package's own classes (aiordma/mr_pool.py, _transport/sharing.py), which
 * set the members: so that making a request out of two of them reads a few words and calls nothing.
 */
#include "block.h"

PyTypeObject *fast_pinned_type;
PyTypeObject *fast_local_type;
PyTypeObject *fast_remote_type;

/* ---- pinned ---------------------------------------------------------------------------------- */

static PyObject *settle(struct pinned *pinned)
{
	if (pinned->pins || pinned->leases)
		Py_RETURN_NONE;
	if (PyObject_TypeCheck((PyObject *)pinned, fast_block_type))
		return fast_settle_block((struct block *)pinned);
	return PyObject_CallMethod((PyObject *)pinned, "_retire", NULL);
}

void fast_unpin(PyObject *object)
{
	struct pinned *pinned = (struct pinned *)object;

	if (--pinned->pins || pinned->leases)
		return;
	PyObject *done = settle(pinned);
	if (!done)
		PyErr_WriteUnraisable(object);
	Py_XDECREF(done);
}

static PyObject *pinned_pin(PyObject *self, PyObject *unused)
{
	(void)unused;
	((struct pinned *)self)->pins++;
	Py_RETURN_NONE;
}

static PyObject *pinned_unpin(PyObject *self, PyObject *unused)
{
	(void)unused;
	((struct pinned *)self)->pins--;
	return settle((struct pinned *)self);
}

static PyObject *pinned_lease(PyObject *self, PyObject *unused)
{
	(void)unused;
	((struct pinned *)self)->leases++;
	Py_RETURN_NONE;
}

static PyObject *pinned_release(PyObject *self, PyObject *unused)
{
	(void)unused;
	((struct pinned *)self)->leases--;
	return settle((struct pinned *)self);
}

static PyMethodDef pinned_methods[] = {
	{"pin", pinned_pin, METH_NOARGS, "A work request is about to use the memory."},
	{"unpin", pinned_unpin, METH_NOARGS, "The work request has been done."},
	{"lease", pinned_lease, METH_NOARGS, "One lease more."},
	{"release", pinned_release, METH_NOARGS, "One of them has it no more."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot pinned_slots[] = {
	{Py_tp_doc,
	 "Memory; its `_retire` is called when it is neither leased nor pinned any more."},
	{Py_tp_methods, pinned_methods},
	{0, NULL},
};

static PyType_Spec pinned_spec = {
	.name = "aiordma._native._fast.Pinned",
	.basicsize = sizeof(struct pinned),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = pinned_slots,
};

/* ---- local ----------------------------------------------------------------------------------- */

struct local *fast_local_root(struct local *local)
{
	return local->root ? (struct local *)local->root : local;
}

struct pinned *fast_pinned_of(struct local *local)
{
	struct local *root = fast_local_root(local);

	if (!root->gone && root->pinned && PyObject_TypeCheck(root->pinned, fast_pinned_type))
		return (struct pinned *)root->pinned;
	PyObject *checked = PyObject_CallMethod((PyObject *)root, "_check", NULL);
	if (checked) {
		Py_DECREF(checked);
		PyErr_SetString(PyExc_TypeError, "memory that nothing holds cannot be pinned");
	}
	return NULL;
}

static PyObject *local_pin(PyObject *self, PyObject *unused)
{
	struct pinned *pinned = fast_pinned_of((struct local *)self);

	(void)unused;
	if (!pinned)
		return NULL;
	pinned->pins++;
	Py_RETURN_NONE;
}

static PyObject *local_unpin(PyObject *self, PyObject *unused)
{
	PyObject *pinned = fast_local_root((struct local *)self)->pinned;

	if (!pinned || !PyObject_TypeCheck(pinned, fast_pinned_type)) {
		PyErr_SetString(PyExc_TypeError, "nothing holds this memory");
		return NULL;
	}
	return pinned_unpin(pinned, unused);
}

static Py_ssize_t local_length(PyObject *self)
{
	return (Py_ssize_t)((struct local *)self)->length;
}

static int local_set_root(PyObject *self, PyObject *value, void *unused)
{
	struct local *local = (struct local *)self;

	(void)unused;
	if (!value || !PyObject_TypeCheck(value, fast_local_type)) {
		PyErr_SetString(PyExc_TypeError, "memory is sliced from memory");
		return -1;
	}
	PyObject *root = (PyObject *)fast_local_root((struct local *)value);
	PyObject *before = local->root;
	Py_INCREF(root);
	local->root = root;
	Py_XDECREF(before);
	return 0;
}

static PyObject *local_get_root(PyObject *self, void *unused)
{
	PyObject *root = (PyObject *)fast_local_root((struct local *)self);

	(void)unused;
	Py_INCREF(root);
	return root;
}

static int local_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct local *local = (struct local *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(local->pinned);
	Py_VISIT(local->root);
	return 0;
}

static int local_clear(PyObject *self)
{
	struct local *local = (struct local *)self;

	Py_CLEAR(local->pinned);
	Py_CLEAR(local->root);
	return 0;
}

static void local_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	local_clear(self);
	fast_free(self);
}

static PyMemberDef local_members[] = {
	{"address", T_ULONGLONG, offsetof(struct local, address), 0, NULL},
	{"length", T_ULONGLONG, offsetof(struct local, length), 0, NULL},
	{"lkey", T_UINT, offsetof(struct local, lkey), 0, NULL},
	{"writable", T_BOOL, offsetof(struct local, writable), 0,
	 "Whether the device may write to it."},
	{"gone", T_BOOL, offsetof(struct local, gone), 0, NULL},
	{"pinned", T_OBJECT_EX, offsetof(struct local, pinned), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef local_getset[] = {
	{"root", local_get_root, local_set_root, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef local_methods[] = {
	{"pin", local_pin, METH_NOARGS,
	 "A work request is about to use the memory; raises what `_check` does after its release."},
	{"unpin", local_unpin, METH_NOARGS, "The work request has been done."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot local_slots[] = {
	{Py_tp_doc, "Registered memory of this process."},
	{Py_tp_members, local_members},
	{Py_tp_getset, local_getset},
	{Py_tp_methods, local_methods},
	{Py_mp_length, local_length},
	{Py_sq_length, local_length},
	{Py_tp_traverse, local_traverse},
	{Py_tp_clear, local_clear},
	{Py_tp_dealloc, local_dealloc},
	{0, NULL},
};

static PyType_Spec local_spec = {
	.name = "aiordma._native._fast.Local",
	.basicsize = sizeof(struct local),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = local_slots,
};

/* ---- remote ---------------------------------------------------------------------------------- */

struct remote *fast_remote_root(struct remote *remote)
{
	return remote->root ? (struct remote *)remote->root : remote;
}

static Py_ssize_t remote_length(PyObject *self)
{
	return (Py_ssize_t)((struct remote *)self)->length;
}

static int remote_set_root(PyObject *self, PyObject *value, void *unused)
{
	struct remote *remote = (struct remote *)self;

	(void)unused;
	if (!value || !PyObject_TypeCheck(value, fast_remote_type)) {
		PyErr_SetString(PyExc_TypeError, "memory of the peer is sliced from such memory");
		return -1;
	}
	PyObject *root = (PyObject *)fast_remote_root((struct remote *)value);
	PyObject *before = remote->root;
	Py_INCREF(root);
	remote->root = root;
	Py_XDECREF(before);
	return 0;
}

static PyObject *remote_get_root(PyObject *self, void *unused)
{
	PyObject *root = (PyObject *)fast_remote_root((struct remote *)self);

	(void)unused;
	Py_INCREF(root);
	return root;
}

static int remote_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct remote *remote = (struct remote *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(remote->user);
	Py_VISIT(remote->root);
	return 0;
}

static int remote_clear(PyObject *self)
{
	struct remote *remote = (struct remote *)self;

	Py_CLEAR(remote->user);
	Py_CLEAR(remote->root);
	return 0;
}

static void remote_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	remote_clear(self);
	fast_free(self);
}

static PyMemberDef remote_members[] = {
	{"address", T_ULONGLONG, offsetof(struct remote, address), 0, NULL},
	{"length", T_ULONGLONG, offsetof(struct remote, length), 0, NULL},
	{"rkey", T_UINT, offsetof(struct remote, rkey), 0, NULL},
	{"allowed", T_UINT, offsetof(struct remote, rights), 0, NULL},
	{"usable", T_BOOL, offsetof(struct remote, usable), 0, NULL},
	{"user", T_OBJECT_EX, offsetof(struct remote, user), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef remote_getset[] = {
	{"root", remote_get_root, remote_set_root, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot remote_slots[] = {
	{Py_tp_doc, "Memory of the peer."},
	{Py_tp_members, remote_members},
	{Py_tp_getset, remote_getset},
	{Py_mp_length, remote_length},
	{Py_sq_length, remote_length},
	{Py_tp_traverse, remote_traverse},
	{Py_tp_clear, remote_clear},
	{Py_tp_dealloc, remote_dealloc},
	{0, NULL},
};

static PyType_Spec remote_spec = {
	.name = "aiordma._native._fast.Remote",
	.basicsize = sizeof(struct remote),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = remote_slots,
};

int fast_add_memory(PyObject *module)
{
	fast_pinned_type = fast_add_type(module, &pinned_spec);
	fast_local_type = fast_pinned_type ? fast_add_type(module, &local_spec) : NULL;
	fast_remote_type = fast_local_type ? fast_add_type(module, &remote_spec) : NULL;
	return fast_remote_type ? 0 : -1;
}
