/* Messages that wait for their turn, and frames under way.
 *
 * A frame is a work request that holds its block until its completion, and settles the waiters of
 * its messages.  Where the bytes of a waiting message lie is looked up once, when it comes: who sends
 * has promised that they stay.
 */
#include <string.h>

#include "frame.h"
#include "message.h"
#include "promise.h"
#include "traffic.h"

PyTypeObject *fast_outgoing_type, *fast_frame_type;

/* ---- bytes ------------------------------------------------------------------------------------- */

int fast_open_parcel(struct parcel *parcel, PyObject *data)
{
	memset(parcel, 0, sizeof(*parcel));
	if (PyBytes_CheckExact(data)) {
		Py_INCREF(data);
		parcel->source = data;
		parcel->bytes = (const unsigned char *)PyBytes_AsString(data);
		parcel->length = (unsigned long long)PyBytes_Size(data);
		return 1;
	}
	if (PyObject_TypeCheck(data, fast_message_type)) {
		struct message *message = (struct message *)data;
		struct block *block = (struct block *)message->block;

		if (!block)
			return 0;
		block->pinned.leases++;
		Py_INCREF((PyObject *)block);
		parcel->source = (PyObject *)block;
		parcel->bytes = fast_block_bytes(block) + message->offset;
		parcel->length = message->length;
		return 1;
	}
	if (!PyMemoryView_Check(data) && !PyByteArray_CheckExact(data))
		return 0;
	if (PyObject_GetBuffer(data, &parcel->buffer, PyBUF_SIMPLE)) {
		if (!PyErr_ExceptionMatches(PyExc_BufferError))
			return -1;
		PyErr_Clear(); /* it is not contiguous */
		return 0;
	}
	parcel->has_buffer = 1;
	Py_INCREF(data);
	parcel->source = data;
	parcel->bytes = parcel->buffer.buf;
	parcel->length = (unsigned long long)parcel->buffer.len;
	return 1;
}

int fast_parcel_imm(struct parcel *parcel, PyObject *imm)
{
	parcel->has_imm = imm != Py_None;
	if (!parcel->has_imm)
		return 0;
	unsigned long value = PyLong_AsUnsignedLong(imm);

	if (PyErr_Occurred())
		return -1;
	if (value > UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "immediate data of more than 32 bits");
		return -1;
	}
	parcel->imm = (unsigned int)value;
	return 0;
}

void fast_close_parcel(struct parcel *parcel)
{
	PyObject *source = parcel->source;

	parcel->source = NULL;
	if (parcel->has_buffer)
		PyBuffer_Release(&parcel->buffer);
	parcel->has_buffer = 0;
	if (source && PyObject_TypeCheck(source, fast_block_type))
		fast_release_block((struct block *)source);
	Py_XDECREF(source);
}

/* ---- a message that waits ---------------------------------------------------------------------- */

struct outgoing *fast_new_outgoing(struct parcel *parcel, PyObject *waiter)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(fast_outgoing_type, Py_tp_alloc);
	struct outgoing *outgoing = (struct outgoing *)alloc(fast_outgoing_type, 0);

	if (!outgoing) {
		fast_close_parcel(parcel);
		return NULL;
	}
	fast_move_parcel(&outgoing->parcel, parcel);
	Py_INCREF(waiter);
	outgoing->waiter = waiter;
	return outgoing;
}

static int outgoing_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"view", "imm", "future", NULL};
	struct outgoing *outgoing = (struct outgoing *)self;
	PyObject *view, *imm, *waiter;

	if (outgoing->waiter) {
		PyErr_SetString(PyExc_TypeError, "once is enough");
		return -1;
	}
	if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO", names, &view, &imm, &waiter))
		return -1;
	int rc = fast_open_parcel(&outgoing->parcel, view);

	if (!rc)
		PyErr_SetString(PyExc_TypeError, "bytes, or a view of bytes");
	if (rc <= 0 || fast_parcel_imm(&outgoing->parcel, imm))
		return -1;
	Py_INCREF(waiter);
	outgoing->waiter = waiter;
	return 0;
}

static PyObject *outgoing_view(PyObject *self, void *unused)
{
	struct parcel *parcel = &((struct outgoing *)self)->parcel;

	(void)unused;
	if (!parcel->source) {
		PyErr_SetString(PyExc_ValueError, "the message has been offered");
		return NULL;
	}
	if (PyObject_TypeCheck(parcel->source, fast_block_type)) {
		struct block *block = (struct block *)parcel->source;
		unsigned long long offset = (uintptr_t)parcel->bytes - block->address;

		return fast_block_view(block, offset, offset + parcel->length);
	}
	return PyMemoryView_FromObject(parcel->source);
}

static PyObject *outgoing_imm(PyObject *self, void *unused)
{
	struct parcel *parcel = &((struct outgoing *)self)->parcel;

	(void)unused;
	if (parcel->has_imm)
		return PyLong_FromUnsignedLong(parcel->imm);
	Py_RETURN_NONE;
}

static PyObject *outgoing_drop(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	Py_RETURN_NONE;
}

static int outgoing_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct outgoing *outgoing = (struct outgoing *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(outgoing->parcel.source);
	Py_VISIT(outgoing->parcel.buffer.obj);
	Py_VISIT(outgoing->waiter);
	return 0;
}

static int outgoing_clear(PyObject *self)
{
	Py_CLEAR(((struct outgoing *)self)->waiter);
	return 0;
}

static void outgoing_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	outgoing_clear(self);
	fast_close_parcel(&((struct outgoing *)self)->parcel);
	fast_free(self);
}

static PyMemberDef outgoing_members[] = {
	{"future", T_OBJECT, offsetof(struct outgoing, waiter), READONLY, NULL},
	{"length", T_ULONGLONG, offsetof(struct outgoing, parcel.length), READONLY, NULL},
	{"turn", T_ULONGLONG, offsetof(struct outgoing, turn), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef outgoing_getset[] = {
	{"view", outgoing_view, NULL, NULL, NULL},
	{"imm", outgoing_imm, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef outgoing_methods[] = {
	{"drop", outgoing_drop, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot outgoing_slots[] = {
	{Py_tp_doc, "A message that waits for its turn."},
	{Py_tp_init, outgoing_init},
	{Py_tp_members, outgoing_members},
	{Py_tp_getset, outgoing_getset},
	{Py_tp_methods, outgoing_methods},
	{Py_tp_traverse, outgoing_traverse},
	{Py_tp_clear, outgoing_clear},
	{Py_tp_dealloc, outgoing_dealloc},
	{0, NULL},
};

static PyType_Spec outgoing_spec = {
	.name = "aiordma._native._fast.Outgoing",
	.basicsize = sizeof(struct outgoing),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = outgoing_slots,
};

/* ---- a frame ----------------------------------------------------------------------------------- */

static int make_room(struct frame *frame, uint32_t count)
{
	if (count > 1) {
		frame->waiters = PyMem_Calloc(count, sizeof(PyObject *));
		if (!frame->waiters) {
			PyErr_NoMemory();
			return -1;
		}
	}
	frame->count = count;
	return 0;
}

PyObject **fast_frame_waiters(struct frame *frame)
{
	return frame->count > 1 ? frame->waiters : &frame->one;
}

static void put_into(struct frame *frame, struct block *block, uint32_t length)
{
	frame->work.kind = KIND_SEND;
	frame->work.opcode = IBV_WR_SEND;
	frame->work.address = block->address;
	frame->work.length = length;
	frame->work.lkey = block->lkey;
	Py_INCREF((PyObject *)block);
	frame->block = (PyObject *)block;
}

struct frame *fast_new_frame(struct block *block, uint32_t length, uint32_t count)
{
	static allocfunc alloc;

	if (!alloc)
		alloc = (allocfunc)PyType_GetSlot(fast_frame_type, Py_tp_alloc);
	struct frame *frame = (struct frame *)alloc(fast_frame_type, 0);

	if (!frame) {
		fast_release_block(block);
		return NULL;
	}
	put_into(frame, block, length);
	if (make_room(frame, count)) {
		Py_DECREF((PyObject *)frame);
		return NULL;
	}
	return frame;
}

void fast_frame_adds(struct frame *frame, struct parcel *parcel, unsigned int lkey)
{
	fast_move_parcel(&frame->parcel, parcel);
	frame->work.more = (struct ibv_sge){
		.addr = (uintptr_t)frame->parcel.bytes,
		.length = (uint32_t)frame->parcel.length,
		.lkey = lkey,
	};
}

static int frame_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"block", "length", "future", "spares", NULL};
	struct frame *frame = (struct frame *)self;
	PyObject *block, *waiter = NULL, *spares = NULL;
	unsigned int length;

	if (frame->block) {
		PyErr_SetString(PyExc_TypeError, "once is enough");
		return -1;
	}
	if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!I|OO", names, fast_block_type, &block,
					 &length, &waiter, &spares))
		return -1;
	put_into(frame, (struct block *)block, length);
	if (waiter && waiter != Py_None) {
		Py_INCREF(waiter);
		frame->one = waiter;
		frame->count = 1;
	}
	if (spares && spares != Py_None) {
		Py_INCREF(spares);
		frame->spares = spares;
	}
	return 0;
}

static int let_go(struct frame *frame)
{
	PyObject *block = frame->block;
	int rc = 0;

	if (!block)
		return 0;
	frame->block = NULL;
	fast_close_parcel(&frame->parcel);
	if (frame->traffic)
		((struct traffic *)frame->traffic)->under_way--;
	if (frame->spares)
		rc = PyList_Append(frame->spares, block);
	else
		fast_release_block((struct block *)block);
	Py_DECREF(block);
	return rc;
}

static int tell_all(struct frame *frame, PyObject *error)
{
	PyObject **waiters = fast_frame_waiters(frame);
	int rc = 0;

	for (uint32_t i = 0; i < frame->count; i++)
		if (waiters[i] && fast_tell(waiters[i], error))
			rc = -1;
	return rc;
}

int fast_frame_done(struct frame *frame)
{
	int rc = let_go(frame);

	if (frame->traffic)
		fast_count_sent((struct traffic *)frame->traffic, frame->messages, frame->bytes);

	return tell_all(frame, NULL) ? -1 : rc;
}

static PyObject *none_unless(int rc)
{
	if (rc)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *frame_failed(PyObject *self, PyObject *error)
{
	return none_unless(tell_all((struct frame *)self, error));
}

static PyObject *frame_release(PyObject *self, PyObject *unused)
{
	(void)unused;
	return none_unless(let_go((struct frame *)self));
}

static int frame_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct frame *frame = (struct frame *)self;
	PyObject **waiters = fast_frame_waiters(frame);

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(frame->block);
	Py_VISIT(frame->spares);
	Py_VISIT(frame->traffic);
	Py_VISIT(frame->parcel.source);
	Py_VISIT(frame->parcel.buffer.obj);
	for (uint32_t i = 0; i < frame->count; i++)
		Py_VISIT(waiters[i]);
	return 0;
}

static int frame_clear(PyObject *self)
{
	struct frame *frame = (struct frame *)self;
	PyObject **waiters = fast_frame_waiters(frame);

	for (uint32_t i = 0; i < frame->count; i++)
		Py_CLEAR(waiters[i]);
	Py_CLEAR(frame->spares);
	return 0;
}

static void frame_dealloc(PyObject *self)
{
	struct frame *frame = (struct frame *)self;

	PyObject_GC_UnTrack(self);
	if (let_go(frame))
		PyErr_WriteUnraisable(NULL);
	frame_clear(self);
	Py_CLEAR(frame->traffic);
	PyMem_Free(frame->waiters);
	fast_free(self);
}

static PyMethodDef frame_methods[] = {
	{"failed", frame_failed, METH_O, NULL},
	{"release", frame_release, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot frame_slots[] = {
	{Py_tp_doc, "A frame on its way out."},
	{Py_tp_init, frame_init},
	{Py_tp_methods, frame_methods},
	{Py_tp_traverse, frame_traverse},
	{Py_tp_clear, frame_clear},
	{Py_tp_dealloc, frame_dealloc},
	{0, NULL},
};

static PyType_Spec frame_spec = {
	.name = "aiordma._native._fast.Frame",
	.basicsize = sizeof(struct frame),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = frame_slots,
};

int fast_add_frame(PyObject *module)
{
	fast_frame_type = fast_add_subtype(module, &frame_spec, fast_work_type);
	fast_outgoing_type = fast_frame_type ? fast_add_type(module, &outgoing_spec) : NULL;
	return fast_outgoing_type ? 0 : -1;
}
