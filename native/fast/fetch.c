/* Reads offered messages (rendezvous).
 *
 * The common case: no earlier offer waits; the message is within the read-ahead limit, or a receiver
 * without memory of its own waits for it; and a single READ fetches it into a cached block.  It is read,
 * delivered in order and acknowledged here.  aiordma/_transport/inbox.py handles all other cases, with the
 * same READs.
 */
#include "fetch.h"

PyTypeObject *fast_fetch_type;

static PyObject *str_append, *str_ahead, *str_answer_for, *str_fetched;

/* ---- a READ ------------------------------------------------------------------------------------ */

/* Of `length` bytes from `offset`, to where a block or other registered memory begins, and the same
 * `offset` behind it. */
static struct fetch *new_fetch(PyTypeObject *type, struct inbox *inbox, struct incoming *incoming,
			       PyObject *memory, unsigned long long offset, unsigned int length)
{
	struct block *block = (struct block *)memory;
	struct local *local = (struct local *)memory;
	bool is_block = PyObject_TypeCheck(memory, fast_block_type);
	struct pinned *pinned = is_block ? &block->pinned : fast_pinned_of(local);

	if (!pinned)
		return NULL;
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct fetch *fetch = (struct fetch *)alloc(type, 0);

	if (!fetch)
		return NULL;
	fetch->work.kind = KIND_READ;
	fetch->work.opcode = IBV_WR_RDMA_READ;
	fetch->work.address = (is_block ? block->address : local->address) + offset;
	fetch->work.lkey = is_block ? block->lkey : local->lkey;
	fetch->work.length = length;
	fetch->work.remote_address = incoming->offer.address + offset;
	fetch->work.rkey = (unsigned int)incoming->offer.rkey;
	fetch->inbox = Py_NewRef((PyObject *)inbox);
	fetch->incoming = Py_NewRef((PyObject *)incoming);
	fetch->pinned = Py_NewRef((PyObject *)pinned);
	pinned->pins++;
	return fetch;
}

static PyObject *fetch_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	PyObject *inbox, *incoming, *memory;
	unsigned long long offset;
	unsigned int length;

	if (fast_no_keywords(keywords) ||
	    !PyArg_ParseTuple(args, "O!O!OKI", fast_inbox_type, &inbox, fast_incoming_type,
			      &incoming, &memory, &offset, &length))
		return NULL;
	if (!PyObject_TypeCheck(memory, fast_block_type) &&
	    !PyObject_TypeCheck(memory, fast_local_type)) {
		PyErr_SetString(PyExc_TypeError, "a block, or other registered memory");
		return NULL;
	}
	return (PyObject *)new_fetch(type, (struct inbox *)inbox, (struct incoming *)incoming,
				     memory, offset, length);
}

/* Not that of a Work. */
static int fetch_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	(void)self;
	(void)args;
	(void)keywords;
	return 0;
}

static void let_go(struct fetch *fetch)
{
	PyObject *pinned = fetch->pinned;

	if (!pinned)
		return;
	fetch->pinned = NULL;
	fast_unpin(pinned);
	Py_DECREF(pinned);
}

/* It is not for the device any more: the end of one that failed. */
static PyObject *fetch_release(PyObject *self, PyObject *unused)
{
	(void)unused;
	let_go((struct fetch *)self);
	Py_RETURN_NONE;
}

/* Does nothing: the queue pair has failed, and with it the receivers of the message. */
static PyObject *fetch_failed(PyObject *self, PyObject *error)
{
	(void)self;
	(void)error;
	Py_RETURN_NONE;
}

static PyObject *fetch_get_entries(PyObject *self, void *unused)
{
	(void)self;
	(void)unused;
	return PyLong_FromLong(1);
}

static int fetch_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct fetch *)self)->inbox);
	Py_VISIT(((struct fetch *)self)->incoming);
	Py_VISIT(((struct fetch *)self)->pinned);
	return 0;
}

/* Not the pinned memory: that is the device's. */
static int fetch_clear(PyObject *self)
{
	Py_CLEAR(((struct fetch *)self)->inbox);
	Py_CLEAR(((struct fetch *)self)->incoming);
	return 0;
}

static void fetch_dealloc(PyObject *self)
{
	PyObject *type, *value, *traceback;

	PyObject_GC_UnTrack(self);
	PyErr_Fetch(&type, &value, &traceback);
	let_go((struct fetch *)self);
	PyErr_Restore(type, value, traceback);
	fetch_clear(self);
	fast_free(self);
}

static PyMethodDef fetch_methods[] = {
	{"failed", fetch_failed, METH_O, NULL},
	{"release", fetch_release, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef fetch_getset[] = {
	{"entries", fetch_get_entries, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot fetch_slots[] = {
	{Py_tp_doc, "One READ of a message that was offered."},
	{Py_tp_new, fetch_new},
	{Py_tp_init, fetch_init},
	{Py_tp_methods, fetch_methods},
	{Py_tp_getset, fetch_getset},
	{Py_tp_traverse, fetch_traverse},
	{Py_tp_clear, fetch_clear},
	{Py_tp_dealloc, fetch_dealloc},
	{0, NULL},
};

static PyType_Spec fetch_spec = {
	.name = "aiordma._native._fast.Fetch",
	.basicsize = sizeof(struct fetch),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = fetch_slots,
};

/* ---- reading it -------------------------------------------------------------------------------- */

/* 1: it need not wait until more may be read ahead.  0: it may have to, or there is memory of a receiver's
 * for it.  -1: an exception. */
static int may_be_read(struct inbox *inbox, const struct incoming *incoming)
{
	if (inbox->unstarted != 1 || incoming->offer.length > AIORDMA_TRANSFER_SIZE)
		return 0;
	if (PyObject_Size(inbox->incoming) == 1 && PyObject_Size(inbox->receivers) > 0) {
		PyObject *first = PySequence_GetItem(inbox->receivers, 0);

		if (!first)
			return -1;
		PyObject *target = PyObject_TypeCheck(first, fast_promise_type)
					   ? ((struct promise *)first)->target
					   : first;
		Py_DECREF(first); /* the deque has it */
		return !target || target == Py_None;
	}
	return incoming->offer.length <= inbox->most_ahead &&
	       inbox->ahead <= inbox->most_ahead - incoming->offer.length;
}

static bool may_be_posted(const struct queue *queue)
{
	return queue->accepting && !queue->backlogged && !queue->failed && queue->qp &&
	       queue->free > queue->reserved;
}

/* Into the block, of which the lease is taken over. */
static int fetch_into(struct traffic *traffic, struct incoming *incoming, struct block *block)
{
	struct inbox *inbox = (struct inbox *)traffic->inbox;
	PyObject *made = fast_new_message((PyTypeObject *)traffic->message_type, block, 0,
					  incoming->offer.length);

	if (!made)
		return -1;
	struct message *message = (struct message *)made;
	struct fetch *fetch = new_fetch(fast_fetch_type, inbox, incoming, (PyObject *)block, 0,
					(unsigned int)incoming->offer.length);

	if (!fetch) {
		Py_DECREF(made);
		return -1;
	}
	message->has_imm = incoming->offer.has_imm;
	message->imm = (unsigned int)incoming->offer.imm;
	message->last = 1;
	incoming->message = made;
	incoming->reads_left = 1;
	incoming->started = 1;
	inbox->unstarted--;
	inbox->ahead += incoming->offer.length;
	int rc = fast_post_frame((struct queue *)traffic->queue, (PyObject *)fetch);

	Py_DECREF((PyObject *)fetch);
	return rc;
}

int fast_offered(struct traffic *traffic, struct incoming *incoming)
{
	struct inbox *inbox = (struct inbox *)traffic->inbox;

	if (fast_call(inbox->incoming, str_append, (PyObject *)incoming))
		return -1;
	inbox->offers++;
	inbox->unstarted++;
	int plain = may_be_read(inbox, incoming);

	if (plain < 0)
		return -1;
	struct block *block =
		plain && may_be_posted((struct queue *)traffic->queue)
			? fast_take_block((struct shelf *)traffic->shelf, incoming->offer.length)
			: NULL;

	if (!block)
		return PyErr_Occurred() ? -1 : fast_call((PyObject *)inbox, str_ahead, NULL);
	int rc = fetch_into(traffic, incoming, block);

	Py_DECREF((PyObject *)block);
	return rc;
}

PyObject *fast_traffic_offered(PyObject *self, PyObject *incoming)
{
	if (!PyObject_TypeCheck(incoming, fast_incoming_type)) {
		PyErr_SetString(PyExc_TypeError, "an offer is wanted");
		return NULL;
	}
	if (fast_offered((struct traffic *)self, (struct incoming *)incoming))
		return NULL;
	Py_RETURN_NONE;
}

/* Says that it has been read, and is needed no more. */
static int answer_for(struct inbox *inbox, struct incoming *incoming)
{
	PyObject *traffic = inbox->traffic;
	int said = 0;

	if (traffic && PyObject_TypeCheck(traffic, fast_traffic_type)) {
		Py_INCREF(traffic); /* what it calls may let it go */
		said = fast_answer_offer((struct traffic *)traffic,
					 (unsigned int)incoming->offer.request_id);
		Py_DECREF(traffic);
	}
	if (said)
		return said < 0 ? -1 : 0;
	return fast_call((PyObject *)inbox, str_answer_for, (PyObject *)incoming);
}

int fast_fetch_done(struct fetch *fetch)
{
	struct inbox *inbox = (struct inbox *)fetch->inbox;
	struct incoming *incoming = (struct incoming *)fetch->incoming;

	let_go(fetch);
	if (--incoming->reads_left || inbox->ended)
		return 0;
	if ((incoming->landing && incoming->landing != Py_None) || !incoming->message ||
	    !PyObject_TypeCheck(incoming->message, fast_message_type))
		return fast_call((PyObject *)inbox, str_fetched, (PyObject *)incoming);
	if (answer_for(inbox, incoming))
		return -1;
	return fast_put_message(inbox, (PyObject *)incoming, incoming->message);
}

/* ---- the type ---------------------------------------------------------------------------------- */

int fast_add_fetch(PyObject *module)
{
	str_append = PyUnicode_InternFromString("append");
	str_ahead = PyUnicode_InternFromString("_fetch_ahead");
	str_answer_for = PyUnicode_InternFromString("_answer_for");
	str_fetched = PyUnicode_InternFromString("fetched");
	if (!str_append || !str_ahead || !str_answer_for || !str_fetched)
		return -1;
	fast_fetch_type = fast_add_subtype(module, &fetch_spec, fast_work_type);
	return fast_fetch_type ? 0 : -1;
}
