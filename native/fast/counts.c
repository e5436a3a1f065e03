/* What a connection has done: numbers that C counts up, behind the class that users see. */
#include "traffic.h"

PyTypeObject *fast_counts_type;

#define NUMBER(name) {#name, T_ULONGLONG, offsetof(struct counts, name), 0, NULL}

static PyMemberDef members[] = {
	NUMBER(messages_sent), NUMBER(messages_received),
	NUMBER(bytes_sent),    NUMBER(bytes_received),
	NUMBER(reads),         NUMBER(writes),
	NUMBER(atomics),       {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "Numbers."},
	{Py_tp_members, members},
	{0, NULL},
};

static PyType_Spec spec = {
	.name = "aiordma._native._fast.Counts",
	.basicsize = sizeof(struct counts),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = slots,
};

int fast_add_counts(PyObject *module)
{
	fast_counts_type = fast_add_type(module, &spec);
	return fast_counts_type ? 0 : -1;
}
