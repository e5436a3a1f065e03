/* One work request of one piece of memory.  The package's subclasses say what happens at its end. */
#include "fast.h"

PyTypeObject *fast_work_type;

static int work_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"kind",           "opcode", "address", "length", "lkey",
				"remote_address", "rkey",   "imm",     NULL};
	struct work *work = (struct work *)self;

	return PyArg_ParseTupleAndKeywords(args, keywords, "IIKII|KII", names, &work->kind,
					   &work->opcode, &work->address, &work->length,
					   &work->lkey, &work->remote_address, &work->rkey,
					   &work->imm)
		       ? 0
		       : -1;
}

static PyMemberDef work_members[] = {
	{"kind", T_UINT, offsetof(struct work, kind), 0, NULL},
	{"opcode", T_UINT, offsetof(struct work, opcode), 0, NULL},
	{"address", T_ULONGLONG, offsetof(struct work, address), 0, NULL},
	{"length", T_UINT, offsetof(struct work, length), 0, NULL},
	{"lkey", T_UINT, offsetof(struct work, lkey), 0, NULL},
	{"remote_address", T_ULONGLONG, offsetof(struct work, remote_address), 0, NULL},
	{"rkey", T_UINT, offsetof(struct work, rkey), 0, NULL},
	{"imm", T_UINT, offsetof(struct work, imm), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot work_slots[] = {
	{Py_tp_doc, "One work request of one piece of memory."},
	{Py_tp_init, work_init},
	{Py_tp_members, work_members},
	{0, NULL},
};

static PyType_Spec work_spec = {
	.name = "aiordma._native._fast.Work",
	.basicsize = sizeof(struct work),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = work_slots,
};

int fast_add_work(PyObject *module)
{
	fast_work_type = fast_add_type(module, &work_spec);
	return fast_work_type ? 0 : -1;
}
