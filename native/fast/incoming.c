/* A message that was offered, in its place in the order of arrival, until it is read: see fetch.c. */
#include "fetch.h"

PyTypeObject *fast_incoming_type;

struct incoming *fast_new_incoming(const struct offer *offer)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(fast_incoming_type, Py_tp_alloc);
	struct incoming *incoming = (struct incoming *)alloc(fast_incoming_type, 0);

	if (incoming)
		incoming->offer = *offer;
	return incoming;
}

static PyObject *incoming_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"request_id", "address", "rkey", "length", "imm", NULL};
	unsigned long long request_id, address, rkey, length;
	PyObject *imm;

	(void)type;
	if (!PyArg_ParseTupleAndKeywords(args, keywords, "KKKKO", names, &request_id, &address,
					 &rkey, &length, &imm))
		return NULL;
	const struct offer offer = {
		.request_id = request_id,
		.address = address,
		.rkey = rkey,
		.length = length,
		.imm = imm == Py_None ? 0 : PyLong_AsUnsignedLong(imm),
		.has_imm = imm != Py_None,
	};

	return PyErr_Occurred() ? NULL : (PyObject *)fast_new_incoming(&offer);
}

static PyObject *incoming_get_imm(PyObject *self, void *unused)
{
	struct incoming *incoming = (struct incoming *)self;

	(void)unused;
	if (!incoming->offer.has_imm)
		Py_RETURN_NONE;
	return PyLong_FromUnsignedLong((unsigned long)incoming->offer.imm);
}

static PyObject *incoming_get_ready(PyObject *self, void *unused)
{
	struct incoming *incoming = (struct incoming *)self;
	bool somewhere = (incoming->message && incoming->message != Py_None) ||
			 (incoming->landing && incoming->landing != Py_None);

	(void)unused;
	return PyBool_FromLong(somewhere && !incoming->reads_left);
}

static Py_ssize_t incoming_length(PyObject *self)
{
	return (Py_ssize_t)((struct incoming *)self)->offer.length;
}

static int incoming_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct incoming *)self)->message);
	Py_VISIT(((struct incoming *)self)->landing);
	return 0;
}

static int incoming_clear(PyObject *self)
{
	Py_CLEAR(((struct incoming *)self)->message);
	Py_CLEAR(((struct incoming *)self)->landing);
	return 0;
}

static void incoming_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	incoming_clear(self);
	fast_free(self);
}

static PyMemberDef incoming_members[] = {
	{"request_id", T_ULONGLONG, offsetof(struct incoming, offer.request_id), READONLY, NULL},
	{"address", T_ULONGLONG, offsetof(struct incoming, offer.address), READONLY, NULL},
	{"rkey", T_ULONGLONG, offsetof(struct incoming, offer.rkey), READONLY, NULL},
	{"message", T_OBJECT, offsetof(struct incoming, message), 0, NULL},
	{"landing", T_OBJECT, offsetof(struct incoming, landing), 0, NULL},
	{"reads_left", T_UINT, offsetof(struct incoming, reads_left), 0, NULL},
	{"started", T_BOOL, offsetof(struct incoming, started), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef incoming_getset[] = {
	{"imm", incoming_get_imm, NULL, NULL, NULL},
	{"ready", incoming_get_ready, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot incoming_slots[] = {
	{Py_tp_doc, "A message that was offered."},
	{Py_tp_new, incoming_new},
	{Py_tp_members, incoming_members},
	{Py_tp_getset, incoming_getset},
	{Py_mp_length, incoming_length},
	{Py_sq_length, incoming_length},
	{Py_tp_traverse, incoming_traverse},
	{Py_tp_clear, incoming_clear},
	{Py_tp_dealloc, incoming_dealloc},
	{0, NULL},
};

static PyType_Spec incoming_spec = {
	.name = "aiordma._native._fast.Incoming",
	.basicsize = sizeof(struct incoming),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = incoming_slots,
};

int fast_add_incoming(PyObject *module)
{
	fast_incoming_type = fast_add_type(module, &incoming_spec);
	return fast_incoming_type ? 0 : -1;
}
