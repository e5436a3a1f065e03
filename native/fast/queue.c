/* The queues of one queue pair: what is posted has a slot, and entries of the send queue.
 *
 * The base of aiordma/_transport/work_queue.py, which keeps what finds no entry, and knows what a
 * failure means.  The plainest of all, a single read or write that is allowed and has room, is posted
 * here altogether.
 */
#include <errno.h>

#include "block.h"
#include "promise.h"
#include "queue.h"
#include "run.h"

enum {
	CHAIN = 32,   /* receives that are posted with one call */
	BRIEF = 4096, /* bytes that are posted sooner than other threads could be given the GIL */
};

PyTypeObject *fast_queue_type;

static struct table *table_of(struct queue *queue)
{
	if (queue->table && PyObject_TypeCheck(queue->table, fast_table_type))
		return (struct table *)queue->table;
	PyErr_SetString(PyExc_TypeError, "a queue needs a table");
	return NULL;
}

static int post_run(struct queue *queue, struct run *run, uint64_t wr_id)
{
	struct ibv_qp *qp = (struct ibv_qp *)(uintptr_t)queue->qp;
	struct ibv_qp_ex *extended = (struct ibv_qp_ex *)(uintptr_t)queue->extended;
	int rc;

	fast_number_run(run, wr_id);
	Py_BEGIN_ALLOW_THREADS rc =
		aiordma_post_send(qp, extended, run->sends, run->count, run->sges, &run->posted);
	Py_END_ALLOW_THREADS return rc;
}

static int post_two(struct ibv_qp *qp, struct ibv_qp_ex *extended, const struct work *work,
		    uint64_t wr_id)
{
	const struct ibv_sge sges[] = {
		{.addr = work->address, .length = work->length, .lkey = work->lkey},
		work->more,
	};
	const struct aiordma_send send = {
		.wr_id = wr_id,
		.opcode = work->opcode,
		.send_flags = IBV_SEND_SIGNALED,
		.num_sge = 2,
	};
	uint32_t posted;
	int rc;

	Py_BEGIN_ALLOW_THREADS rc = aiordma_post_send(qp, extended, &send, 1, sges, &posted);
	Py_END_ALLOW_THREADS return rc;
}

static int post_work(struct queue *queue, const struct work *work, uint64_t wr_id)
{
	struct ibv_qp *qp = (struct ibv_qp *)(uintptr_t)queue->qp;
	struct ibv_qp_ex *extended = (struct ibv_qp_ex *)(uintptr_t)queue->extended;
	int rc;

	if (work->more.length)
		return post_two(qp, extended, work, wr_id);
	PyThreadState *others = work->length > BRIEF ? PyEval_SaveThread() : NULL;

	rc = aiordma_post_send_one(qp, extended, wr_id, work->opcode, IBV_SEND_SIGNALED, work->imm,
				   work->address, work->length, work->lkey, work->remote_address,
				   work->rkey, 0);
	if (others)
		PyEval_RestoreThread(others);
	return rc;
}

/* An errno value, or -1 with an exception.  *posted is how many requests the device has all the same;
 * if there are any, the slot stays. */
static int post(struct queue *queue, PyObject *object, uint32_t *posted)
{
	struct table *table = table_of(queue);
	bool is_run = PyObject_TypeCheck(object, fast_run_type);

	*posted = 0;
	if (!table)
		return -1;
	if (!is_run && !PyObject_TypeCheck(object, fast_work_type)) {
		PyErr_SetString(PyExc_TypeError, "a Work or a Run is posted");
		return -1;
	}
	struct run *run = (struct run *)object;
	struct work *work = (struct work *)object;
	uint32_t entries = is_run ? run->count : 1;

	if (!entries || entries > queue->free || !queue->qp) {
		PyErr_Format(PyExc_ValueError, "%u requests for %u free entries of %u", entries,
			     queue->free, queue->capacity);
		return -1;
	}
	int64_t index = fast_take_slot(table, queue, is_run ? run->kind : (uint8_t)work->kind,
				       object, entries);
	if (index < 0)
		return -1;
	queue->free -= entries;
	uint64_t wr_id = fast_wr_id(table, (uint32_t)index);
	int rc = is_run ? post_run(queue, run, wr_id) : post_work(queue, work, wr_id);

	if (rc && is_run)
		*posted = run->posted;
	if (rc && !*posted)
		fast_drop(fast_free_slot(table, &table->slots[index]));
	return rc;
}

static PyObject *queue_post_work(PyObject *self, PyObject *work)
{
	uint32_t posted;
	int rc = post((struct queue *)self, work, &posted);

	return rc < 0 && PyErr_Occurred() ? NULL : Py_BuildValue("iI", rc, posted);
}

int fast_post_frame(struct queue *queue, PyObject *frame)
{
	PyObject *told = NULL;
	uint32_t posted;

	if (queue->failed) {
		told = PyObject_CallMethod((PyObject *)queue, "post_frame", "O", frame);
	} else {
		int rc = post(queue, frame, &posted);

		if (!rc)
			return 0;
		if (!PyErr_Occurred())
			told = PyObject_CallMethod((PyObject *)queue, "_refused", "OiI", frame, rc,
						   posted);
	}
	Py_XDECREF(told);
	return told ? 0 : -1;
}

/* Receives of so many bytes, with one call of the device: an errno value, and how many of them it has;
 * what it does not have has no slot.  -1 with an exception. */
static int post_receives(struct queue *queue, struct table *table, struct block *const *blocks,
			 unsigned int count, uint32_t length, unsigned int *posted)
{
	struct ibv_qp *qp = (struct ibv_qp *)(uintptr_t)queue->qp;
	struct ibv_recv_wr wrs[CHAIN], *bad = NULL;
	struct ibv_sge sges[CHAIN];
	int64_t indices[CHAIN];
	unsigned int made = 0;
	int rc = 0;

	*posted = 0;
	for (; made < count; made++) {
		struct block *block = blocks[made];

		indices[made] = fast_take_slot(table, queue, KIND_RECV, (PyObject *)block, 0);
		if (indices[made] < 0)
			break;
		block->posted = length;
		sges[made] = (struct ibv_sge){
			.addr = block->address,
			.length = length,
			.lkey = block->lkey,
		};
		wrs[made] = (struct ibv_recv_wr){
			.wr_id = fast_wr_id(table, (uint32_t)indices[made]),
			.sg_list = &sges[made],
			.num_sge = length ? 1 : 0,
		};
		if (made)
			wrs[made - 1].next = &wrs[made];
	}
	if (made) {
		rc = qp->context->ops.post_recv(qp, wrs, &bad);
		*posted = !rc ? made : bad ? (unsigned int)(bad - wrs) : 0;
	}
	for (unsigned int i = *posted; i < made; i++)
		fast_drop(fast_free_slot(table, &table->slots[indices[i]]));
	return made < count && !rc ? -1 : rc;
}

static PyObject *queue_post_block(PyObject *self, PyObject *args)
{
	struct queue *queue = (struct queue *)self;
	struct table *table = table_of(queue);
	PyObject *block;
	unsigned int length;

	if (!table || !PyArg_ParseTuple(args, "O!I", fast_block_type, &block, &length))
		return NULL;
	if (!queue->qp) {
		PyErr_SetString(PyExc_TypeError, "a queue pair is needed");
		return NULL;
	}
	unsigned int posted;
	int rc = post_receives(queue, table, (struct block **)&block, 1, length, &posted);

	return rc < 0 && PyErr_Occurred() ? NULL : PyLong_FromLong(rc);
}

int fast_post_receive(struct queue *queue, struct block *block, uint32_t length)
{
	PyObject *told;

	if (queue->qp && !queue->failed) {
		unsigned int posted;
		int rc = post_receives(queue, (struct table *)queue->table, &block, 1, length,
				       &posted);

		if (!rc || PyErr_Occurred())
			return rc ? -1 : 0;
	}
	told = PyObject_CallMethod((PyObject *)queue, "post_receive", "OI", block, length);
	Py_XDECREF(told);
	return told ? 0 : -1;
}

/* At most CHAIN of them. */
static unsigned int post_some_ready(struct queue *queue, struct shelf *shelf, unsigned int most,
				    uint32_t length)
{
	struct block *blocks[CHAIN];
	unsigned int count = 0, posted = 0;

	while (count < most && count < CHAIN) {
		blocks[count] = fast_take_block(shelf, length);
		if (!blocks[count])
			break;
		count++;
	}
	if (count)
		post_receives(queue, (struct table *)queue->table, blocks, count, length, &posted);
	for (unsigned int i = 0; i < count; i++) {
		if (i >= posted)
			fast_release_block(blocks[i]);
		Py_DECREF((PyObject *)blocks[i]);
	}
	PyErr_Clear(); /* the next attempt meets it again */
	return posted;
}

unsigned int fast_post_ready(struct queue *queue, struct shelf *shelf, unsigned int most,
			     uint32_t length)
{
	unsigned int count = 0, more = 1;

	while (more && count < most && queue->qp && !queue->failed) {
		more = post_some_ready(queue, shelf, most - count, length);
		count += more;
	}
	return count;
}

static PyObject *queue_post_ready(PyObject *self, PyObject *args)
{
	struct queue *queue = (struct queue *)self;
	PyObject *shelf;
	unsigned int most, length;

	if (!table_of(queue) ||
	    !PyArg_ParseTuple(args, "O!II", fast_shelf_type, &shelf, &most, &length))
		return NULL;
	return PyLong_FromUnsignedLong(fast_post_ready(queue, (struct shelf *)shelf, most, length));
}

/* A promise, or None when Python has to see to it. */
static PyObject *transfer(struct queue *queue, PyObject *const *args, Py_ssize_t count,
			  enum ibv_wr_opcode opcode)
{
	uint32_t posted;

	if (count != 2) {
		PyErr_SetString(PyExc_TypeError, "memory here and memory there");
		return NULL;
	}
	if (!queue->accepting || queue->backlogged || queue->failed ||
	    queue->free <= queue->reserved || !table_of(queue))
		Py_RETURN_NONE;
	struct run *run =
		fast_new_run(queue->user, opcode == IBV_WR_RDMA_WRITE ? KIND_WRITE : KIND_READ);
	if (!run)
		return NULL;
	int rc = fast_add_transfer(run, args[0], args[1], opcode);
	if (rc == 1) {
		run->waiter = (PyObject *)fast_new_promise(queue->table);
		rc = run->waiter ? post(queue, (PyObject *)run, &posted) : -1;
		if (!rc) {
			PyObject *promise = run->waiter;

			Py_INCREF(promise);
			Py_DECREF((PyObject *)run);
			return promise;
		}
	}
	Py_DECREF((PyObject *)run); /* lets go of the memory */
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *queue_write(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	return transfer((struct queue *)self, args, count, IBV_WR_RDMA_WRITE);
}

static PyObject *queue_read(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	return transfer((struct queue *)self, args, count, IBV_WR_RDMA_READ);
}

/* ---- the end ---------------------------------------------------------------------------------- */

static PyObject *queue_under_way(PyObject *self, PyObject *unused)
{
	struct queue *queue = (struct queue *)self;
	struct table *table = table_of(queue);
	PyObject *works = table ? PyList_New(0) : NULL;

	(void)unused;
	for (uint32_t i = works ? queue->sends.first : NO_SLOT; i != NO_SLOT;
	     i = table->slots[i].next)
		if (PyList_Append(works, table->slots[i].work)) {
			Py_DECREF(works);
			return NULL;
		}
	return works;
}

static int give_back(struct table *table, struct slot_list *list, PyObject *works)
{
	while (list->first != NO_SLOT) {
		struct held held = fast_free_slot(table, &table->slots[list->first]);
		int rc = PyList_Append(works, held.work);

		fast_drop(held);
		if (rc)
			return -1;
	}
	return 0;
}

/* Blocks, all of them. */
static void release_receives(struct table *table, struct slot_list *list)
{
	while (list->first != NO_SLOT) {
		struct held held = fast_free_slot(table, &table->slots[list->first]);

		fast_release_block((struct block *)held.work);
		fast_drop(held);
	}
}

static PyObject *queue_clear_slots(PyObject *self, PyObject *unused)
{
	struct queue *queue = (struct queue *)self;
	struct table *table = table_of(queue);
	PyObject *works = table ? PyList_New(0) : NULL;

	(void)unused;
	queue->qp = 0;
	if (works && give_back(table, &queue->sends, works))
		Py_CLEAR(works);
	if (works)
		release_receives(table, &queue->receives);
	return works;
}

/* ---- the type --------------------------------------------------------------------------------- */

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	(void)args;
	(void)keywords;
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct queue *queue = (struct queue *)alloc(type, 0);

	if (queue)
		queue->sends = queue->receives = (struct slot_list){NO_SLOT, NO_SLOT};
	return (PyObject *)queue;
}

static int queue_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct queue *queue = (struct queue *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(queue->table);
	Py_VISIT(queue->user);
	Py_VISIT(queue->traffic);
	return 0;
}

static int queue_clear(PyObject *self)
{
	struct queue *queue = (struct queue *)self;

	Py_CLEAR(queue->table);
	Py_CLEAR(queue->user);
	Py_CLEAR(queue->traffic);
	return 0;
}

static void queue_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	queue_clear(self);
	fast_free(self);
}

static PyMemberDef queue_members[] = {
	{"table", T_OBJECT, offsetof(struct queue, table), 0, NULL},
	{"user", T_OBJECT, offsetof(struct queue, user), 0, NULL},
	{"traffic", T_OBJECT, offsetof(struct queue, traffic), 0, NULL},
	{"address", T_ULONGLONG, offsetof(struct queue, qp), 0, NULL},
	{"extended_address", T_ULONGLONG, offsetof(struct queue, extended), 0, NULL},
	{"capacity", T_UINT, offsetof(struct queue, capacity), 0, NULL},
	{"free", T_UINT, offsetof(struct queue, free), 0, NULL},
	{"reserved", T_UINT, offsetof(struct queue, reserved), 0, NULL},
	{"completions", T_ULONGLONG, offsetof(struct queue, completions), READONLY, NULL},
	{"accepting", T_BOOL, offsetof(struct queue, accepting), 0, NULL},
	{"backlogged", T_BOOL, offsetof(struct queue, backlogged), 0, NULL},
	{"watched", T_BOOL, offsetof(struct queue, watched), 0, NULL},
	{"failed", T_BOOL, offsetof(struct queue, failed), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef queue_methods[] = {
	{"post_work", queue_post_work, METH_O, NULL},
	{"post_block", queue_post_block, METH_VARARGS, NULL},
	{"post_ready", queue_post_ready, METH_VARARGS, NULL},
	{"write", (PyCFunction)(void (*)(void))queue_write, METH_FASTCALL, NULL},
	{"read", (PyCFunction)(void (*)(void))queue_read, METH_FASTCALL, NULL},
	{"under_way", queue_under_way, METH_NOARGS, NULL},
	{"clear_slots", queue_clear_slots, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
	{Py_tp_doc, "The send and the receive queue of one queue pair."},
	{Py_tp_new, queue_new},
	{Py_tp_members, queue_members},
	{Py_tp_methods, queue_methods},
	{Py_tp_traverse, queue_traverse},
	{Py_tp_clear, queue_clear},
	{Py_tp_dealloc, queue_dealloc},
	{0, NULL},
};

static PyType_Spec queue_spec = {
	.name = "aiordma._native._fast.Queue",
	.basicsize = sizeof(struct queue),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = queue_slots,
};

int fast_add_queue(PyObject *module)
{
	fast_queue_type = fast_add_type(module, &queue_spec);
	return fast_queue_type ? 0 : -1;
}
