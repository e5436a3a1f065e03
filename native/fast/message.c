/* A received message: some bytes of a block, leased until the message is released, or garbage.
 *
 * The base of aiordma/_transport/message.py.  Nothing that a message refers to refers to it, so it
 * needs no cycle collection.
 */
#include "message.h"

PyTypeObject *fast_message_type;

PyObject *fast_new_message(PyTypeObject *type, struct block *block, unsigned long long offset,
			   unsigned long long length)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct message *message = (struct message *)alloc(type, 0);

	if (!message) {
		fast_release_block(block);
		return NULL;
	}
	Py_INCREF((PyObject *)block);
	message->block = (PyObject *)block;
	message->offset = offset;
	message->length = length;
	return (PyObject *)message;
}

static void let_go(struct message *message)
{
	PyObject *block = message->block;

	if (!block)
		return;
	message->block = NULL;
	fast_release_block((struct block *)block);
	Py_DECREF(block);
}

static int number(PyObject *given, unsigned int *value, char *has)
{
	*has = given && given != Py_None;
	if (!*has)
		return 0;
	*value = (unsigned int)PyLong_AsUnsignedLong(given);
	return PyErr_Occurred() ? -1 : 0;
}

static int message_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"block", "offset", "length", "imm", "written", NULL};
	struct message *message = (struct message *)self;
	PyObject *block, *imm, *written = NULL;

	if (message->block) {
		PyErr_SetString(PyExc_TypeError, "once is enough");
		return -1;
	}
	if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!KKO|O", names, fast_block_type, &block,
					 &message->offset, &message->length, &imm, &written) ||
	    number(imm, &message->imm, &message->has_imm) ||
	    number(written, &message->written, &message->has_written))
		return -1;
	Py_INCREF(block);
	message->block = block;
	message->last = 1;
	return 0;
}

static PyObject *message_let_go(PyObject *self, PyObject *unused)
{
	(void)unused;
	let_go((struct message *)self);
	Py_RETURN_NONE;
}

static PyObject *message_enter(PyObject *self, PyObject *unused)
{
	(void)unused;
	Py_INCREF(self);
	return self;
}

static PyObject *message_exit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	(void)args;
	(void)count;
	let_go((struct message *)self);
	Py_RETURN_NONE;
}

static PyObject *message_export(PyObject *self, PyObject *unused)
{
	struct message *message = (struct message *)self;

	(void)unused;
	if (message->block)
		return fast_block_view((struct block *)message->block, message->offset,
				       message->offset + message->length);
	return PyObject_CallMethod(self, "_inert", NULL);
}

static PyObject *message_bytes(PyObject *self, PyObject *unused)
{
	struct message *message = (struct message *)self;

	(void)unused;
	if (message->block)
		return PyBytes_FromStringAndSize(
			(const char *)fast_block_bytes((struct block *)message->block) +
				message->offset,
			(Py_ssize_t)message->length);
	return PyObject_CallMethod(self, "_inert", NULL);
}

static Py_ssize_t message_length(PyObject *self)
{
	return (Py_ssize_t)((struct message *)self)->length;
}

static PyObject *optional(char has, unsigned int value)
{
	if (has)
		return PyLong_FromUnsignedLong(value);
	Py_RETURN_NONE;
}

static PyObject *message_imm(PyObject *self, void *unused)
{
	struct message *message = (struct message *)self;

	(void)unused;
	return optional(message->has_imm, message->imm);
}

static PyObject *message_written(PyObject *self, void *unused)
{
	struct message *message = (struct message *)self;

	(void)unused;
	return optional(message->has_written, message->written);
}

static void message_dealloc(PyObject *self)
{
	let_go((struct message *)self);
	fast_free(self);
}

static PyMemberDef message_members[] = {
	{"_block", T_OBJECT, offsetof(struct message, block), READONLY, NULL},
	{"last", T_BOOL, offsetof(struct message, last), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef message_getset[] = {
	{"imm", message_imm, NULL, "The sender's immediate data, or None.", NULL},
	{"written", message_written, NULL, "Bytes of the last piece of a write, or None.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef message_methods[] = {
	{"let_go", message_let_go, METH_NOARGS, NULL},
	{"export", message_export, METH_NOARGS, NULL},
	{"__bytes__", message_bytes, METH_NOARGS, NULL},
	{"__enter__", message_enter, METH_NOARGS, NULL},
	{"__exit__", (PyCFunction)(void (*)(void))message_exit, METH_FASTCALL, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot message_slots[] = {
	{Py_tp_doc, "A received message."},
	{Py_tp_init, message_init},
	{Py_tp_members, message_members},
	{Py_tp_getset, message_getset},
	{Py_tp_methods, message_methods},
	{Py_mp_length, message_length},
	{Py_sq_length, message_length},
	{Py_tp_dealloc, message_dealloc},
	{0, NULL},
};

static PyType_Spec message_spec = {
	.name = "aiordma._native._fast.Message",
	.basicsize = sizeof(struct message),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = message_slots,
};

int fast_add_message(PyObject *module)
{
	fast_message_type = fast_add_type(module, &message_spec);
	return fast_message_type ? 0 : -1;
}
