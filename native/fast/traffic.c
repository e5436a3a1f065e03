/* The two-sided traffic of a connection: what is plain of it.
 *
 * The base of aiordma/_transport/messages.py, where the rules stand.  Plain is a message, while there is
 * a credit, room in the send queue, a block that is ready, and no other work to be posted first; what
 * fits no frame is offered (offering.c).  Everything else goes to Python, which does it, or says what is
 * wrong with it.  What comes in is arrival.c's; credits that go back, and the receives that they stand
 * for, refill.c's.
 */
#include <string.h>

#include "traffic.h"

/* Less is copied quicker than a second piece is looked up. */
enum {
	COPIED_BELOW = 4096
};

/* What would not gain by sharing a frame with others: waiting for them, until the task has gone on and the
 * loop comes round, would only keep it back.  An offer cannot share one at all. */
enum {
	SENT_AT_ONCE = 16 * 1024
};

/* Frames that are sent before Python is told, lest their number grow for ever. */
enum {
	MOST_UNTOLD = 1 << 16
};

PyTypeObject *fast_traffic_type;

static PyObject *str_append, *str_appendleft, *str_popleft, *str_collect, *str_call_soon,
	*str_send_first, *str_pump_controls, *str_parted, *str_sent;

static bool can_send(const struct traffic *traffic)
{
	const struct account *account = (struct account *)traffic->account;
	const struct queue *queue = (struct queue *)traffic->queue;

	return traffic->started && !traffic->ended && account->data &&
	       !fast_offers_full((struct offers *)traffic->offers) && !traffic->blocked &&
	       queue->free > queue->reserved && !queue->failed;
}

static bool is_plain(const struct traffic *traffic)
{
	return can_send(traffic) && !((struct queue *)traffic->queue)->backlogged;
}

/* The header of a frame, for which a credit is spent. */
static void begin(struct traffic *traffic, unsigned char *bytes, unsigned char kind,
		  unsigned int imm)
{
	unsigned int control, data;

	fast_spend_data((struct account *)traffic->account, &control, &data);
	fast_put_header(bytes, kind, control, data, imm);
}

int fast_post_counted(struct traffic *traffic, struct frame *frame)
{
	if (fast_post_frame((struct queue *)traffic->queue, (PyObject *)frame))
		return -1;
	traffic->sent++;
	return traffic->counting || traffic->sent == MOST_UNTOLD
		       ? fast_call((PyObject *)traffic, str_sent, NULL)
		       : 0;
}

int fast_post_messages(struct traffic *traffic, struct frame *frame)
{
	Py_INCREF((PyObject *)traffic);
	frame->traffic = (PyObject *)traffic;
	traffic->under_way++;
	return fast_post_counted(traffic, frame);
}

struct block *fast_frame_block(struct traffic *traffic, unsigned long long size)
{
	struct block *block = fast_take_block((struct shelf *)traffic->shelf, size);

	if (block || PyErr_Occurred())
		return block;
	PyObject *made = PyObject_CallMethod((PyObject *)traffic, "_make_block", "K", size);
	if (made && !PyObject_TypeCheck(made, fast_block_type))
		Py_CLEAR(made); /* None: there is no memory now */
	return (struct block *)made;
}

/* 1: posted, with the parcel if that is sent from where it lies.  0: there is no block.  -1: an
 * exception. */
static int send_one(struct traffic *traffic, struct parcel *parcel, PyObject *waiter)
{
	unsigned int everything = ((struct shelf *)traffic->shelf)->everything;
	bool in_place = everything && parcel->length >= COPIED_BELOW;
	unsigned long long length = FRAME_HEADER + (in_place ? 0 : parcel->length);
	struct block *block = fast_frame_block(traffic, length);

	if (!block)
		return PyErr_Occurred() ? -1 : 0;
	struct frame *frame = fast_new_frame(block, (uint32_t)length, 1);

	if (!frame) {
		Py_DECREF((PyObject *)block);
		return -1;
	}
	unsigned char *bytes = fast_block_bytes(block);

	Py_DECREF((PyObject *)block);
	Py_INCREF(waiter);
	*fast_frame_waiters(frame) = waiter;
	frame->messages = 1;
	frame->bytes = parcel->length;
	begin(traffic, bytes, FRAME_DATA | (parcel->has_imm ? FRAME_IMMEDIATE : 0), parcel->imm);
	if (in_place)
		fast_frame_adds(frame, parcel, everything);
	else
		memcpy(bytes + FRAME_HEADER, parcel->bytes, parcel->length);
	int rc = fast_post_messages(traffic, frame);

	Py_DECREF((PyObject *)frame);
	return rc ? -1 : 1;
}

static bool fits(const struct traffic *traffic, const struct parcel *parcel)
{
	return parcel->length + FRAME_HEADER <= traffic->peer_size;
}

/* As send_one, or 0 for an offer that is for Python. */
static int send_alone(struct traffic *traffic, struct parcel *parcel, PyObject *waiter)
{
	return fits(traffic, parcel) ? send_one(traffic, parcel, waiter)
				     : fast_offer(traffic, parcel, waiter);
}

static unsigned long long bundled(const struct outgoing *outgoing)
{
	return 8 + ((outgoing->parcel.length + 7) & ~7ULL);
}

static int send_bundle(struct traffic *traffic, struct outgoing **all, uint32_t count,
		       unsigned long long size)
{
	struct block *block = fast_frame_block(traffic, size);

	if (!block)
		return PyErr_Occurred() ? -1 : 0;
	struct frame *frame = fast_new_frame(block, (uint32_t)size, count);

	if (!frame) {
		Py_DECREF((PyObject *)block);
		return -1;
	}
	unsigned char *bytes = fast_block_bytes(block);
	PyObject **waiters = fast_frame_waiters(frame);

	Py_DECREF((PyObject *)block);
	begin(traffic, bytes, FRAME_BUNDLE, 0);
	frame->messages = count;
	bytes += FRAME_HEADER;
	for (uint32_t i = 0; i < count; i++) {
		const struct parcel *parcel = &all[i]->parcel;
		unsigned long long whole = bundled(all[i]);

		fast_put_word(bytes,
			      (uint32_t)parcel->length | (parcel->has_imm ? ENTRY_IMMEDIATE : 0));
		fast_put_word(bytes + 4, parcel->imm);
		memcpy(bytes + 8, parcel->bytes, parcel->length);
		memset(bytes + 8 + parcel->length, 0, whole - 8 - parcel->length);
		bytes += whole;
		frame->bytes += parcel->length;
		Py_INCREF(all[i]->waiter);
		waiters[i] = all[i]->waiter;
	}
	int rc = fast_post_messages(traffic, frame);

	Py_DECREF((PyObject *)frame);
	return rc ? -1 : 1;
}

static struct outgoing *pop(struct traffic *traffic)
{
	return (struct outgoing *)PyObject_CallMethodObjArgs(traffic->waiting, str_popleft, NULL);
}

/* A new reference to the first that waits, if it is a message. */
static struct outgoing *first_plain(struct traffic *traffic)
{
	PyObject *first = PySequence_GetItem(traffic->waiting, 0);

	if (first && Py_TYPE(first) != fast_outgoing_type)
		Py_CLEAR(first);
	return (struct outgoing *)first;
}

/* Takes from those that wait as many as go into one frame, or one that fits none: their number, or -1. */
static int gather(struct traffic *traffic, struct outgoing **all, unsigned long long *size)
{
	int count = 0;

	*size = FRAME_HEADER;
	while (count < MOST_BUNDLED && PyObject_Size(traffic->waiting) > 0) {
		struct outgoing *next = first_plain(traffic);

		if (!next)
			return PyErr_Occurred() ? -1 : count;
		unsigned long long longer = *size + bundled(next);
		int over = fast_is_over(next->waiter);
		bool enough = count && longer > traffic->peer_size;

		Py_DECREF((PyObject *)next); /* the deque has it */
		if (over < 0)
			return -1;
		if (!over && enough)
			return count;
		next = pop(traffic);
		if (!next)
			return -1;
		if (over) {
			Py_DECREF((PyObject *)next);
			continue;
		}
		all[count++] = next;
		*size = longer;
	}
	return count;
}

/* 1: some of those that wait have been sent.  0: it is for Python, if it can be done.  -1. */
static int send_some(struct traffic *traffic)
{
	struct outgoing *all[MOST_BUNDLED];
	unsigned long long size;
	int count = gather(traffic, all, &size);
	int rc = count <= 0 ? count : 1;

	if (count > 1)
		rc = send_bundle(traffic, all, (uint32_t)count, size);
	else if (count == 1)
		rc = send_alone(traffic, &all[0]->parcel, all[0]->waiter);
	for (int i = count; i-- > 0;) {
		if (!rc && fast_call(traffic->waiting, str_appendleft, (PyObject *)all[i]))
			rc = -1;
		Py_DECREF((PyObject *)all[i]);
	}
	return rc;
}

static int send_waiting(struct traffic *traffic)
{
	while (PyObject_Size(traffic->waiting) > 0 && can_send(traffic)) {
		int rc = is_plain(traffic) ? send_some(traffic) : 0;

		if (rc < 0)
			return -1;
		if (rc || PyObject_Size(traffic->waiting) == 0)
			continue;
		PyObject *more =
			PyObject_CallMethodObjArgs((PyObject *)traffic, str_send_first, NULL);
		int again = more ? PyObject_IsTrue(more) : -1;

		Py_XDECREF(more);
		if (again <= 0)
			return again;
	}
	return 0;
}

int fast_pump(struct traffic *traffic)
{
	if (!traffic->started || traffic->ended)
		return 0;
	if (PyObject_Size(traffic->controls) > 0 &&
	    fast_call((PyObject *)traffic, str_pump_controls, NULL))
		return -1;
	if (PyObject_Size(traffic->waiting) > 0 && send_waiting(traffic))
		return -1;
	if (fast_credit_frame_due((struct account *)traffic->account) && !traffic->ended &&
	    fast_send_credits(traffic))
		return -1;
	return traffic->parting ? fast_call((PyObject *)traffic, str_parted, NULL) : 0;
}

static PyObject *traffic_pump(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (fast_pump((struct traffic *)self))
		return NULL;
	Py_RETURN_NONE;
}

static int collect(struct traffic *traffic)
{
	struct table *table = (struct table *)((struct queue *)traffic->queue)->table;
	PyObject *handle = NULL;

	if (traffic->collecting)
		return 0;
	if (!traffic->collected)
		traffic->collected = PyObject_GetAttr((PyObject *)traffic, str_collect);
	if (traffic->collected)
		handle = PyObject_CallMethodObjArgs(table->loop, str_call_soon, traffic->collected,
						    NULL);
	Py_XDECREF(handle);
	if (!handle)
		return -1;
	traffic->collecting = 1;
	return 0;
}

static PyObject *traffic_collect_soon(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (collect((struct traffic *)self))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *traffic_post(PyObject *self, PyObject *args)
{
	PyObject *frame;
	unsigned int messages;
	unsigned long long bytes;

	if (!PyArg_ParseTuple(args, "O!IK", fast_frame_type, &frame, &messages, &bytes))
		return NULL;
	((struct frame *)frame)->messages = messages;
	((struct frame *)frame)->bytes = bytes;
	if (fast_post_messages((struct traffic *)self, (struct frame *)frame))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *traffic_collect(PyObject *self, PyObject *unused)
{
	struct traffic *traffic = (struct traffic *)self;

	traffic->collecting = 0;
	Py_CLEAR(traffic->collected); /* it refers back */
	return traffic_pump(self, unused);
}

/* 1: it is on its way, or waits.  0: it is for Python.  -1: an exception. */
static int send_parcel(struct traffic *traffic, struct parcel *parcel, PyObject *waiter)
{
	if (!is_plain(traffic))
		return 0;
	bool others = PyObject_Size(traffic->waiting) > 0;

	bool shares = parcel->length < SENT_AT_ONCE && fits(traffic, parcel);

	if (!others && (!traffic->under_way || !shares))
		return send_alone(traffic, parcel, waiter);
	struct outgoing *outgoing = fast_new_outgoing(parcel, waiter);
	int rc = outgoing ? fast_call(traffic->waiting, str_append, (PyObject *)outgoing) : -1;

	Py_XDECREF((PyObject *)outgoing);
	if (rc || (!others && collect(traffic)))
		return -1;
	return 1;
}

void fast_count_sent(struct traffic *traffic, unsigned int messages, unsigned long long bytes)
{
	struct counts *counts = (struct counts *)traffic->counts;

	if (!counts)
		return; /* it is garbage */
	counts->messages_sent += messages;
	counts->bytes_sent += bytes;
}

static PyObject *traffic_new_promise(PyObject *self, PyObject *unused)
{
	PyObject *queue = ((struct traffic *)self)->queue;
	struct promise *promise = fast_new_promise(((struct queue *)queue)->table);

	(void)unused;
	if (promise) {
		promise->sends = 1;
		Py_INCREF(self);
		promise->target = self;
	}
	return (PyObject *)promise;
}

/* A promise, or None when it is for Python. */
static PyObject *traffic_deliver(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct traffic *traffic = (struct traffic *)self;
	struct parcel parcel;
	PyObject *promise = NULL;

	if (count != 2) {
		PyErr_SetString(PyExc_TypeError, "data, imm");
		return NULL;
	}
	if (!traffic->started || traffic->ended || traffic->closing ||
	    !fast_is_here((struct table *)((struct queue *)traffic->queue)->table))
		Py_RETURN_NONE;
	int rc = fast_open_parcel(&parcel, args[0]);

	if (rc <= 0 || fast_parcel_imm(&parcel, args[1]) || parcel.length > traffic->max_message) {
		if (rc > 0)
			fast_close_parcel(&parcel);
		PyErr_Clear(); /* it will be met again, and told in other words */
		Py_RETURN_NONE;
	}
	promise = traffic_new_promise(self, NULL);
	rc = promise ? send_parcel(traffic, &parcel, promise) : -1;
	fast_close_parcel(&parcel);
	if (rc > 0)
		return promise;
	Py_XDECREF(promise);
	if (rc < 0)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *traffic_send_plainly(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct parcel parcel;

	if (count != 3) {
		PyErr_SetString(PyExc_TypeError, "data, imm, waiter");
		return NULL;
	}
	int rc = fast_open_parcel(&parcel, args[0]);

	if (rc > 0) {
		rc = fast_parcel_imm(&parcel, args[1])
			     ? -1
			     : send_parcel((struct traffic *)self, &parcel, args[2]);
		fast_close_parcel(&parcel);
	}
	return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static PyObject *traffic_take_frame(PyObject *self, PyObject *args)
{
	PyObject *block;
	unsigned int length;

	if (!PyArg_ParseTuple(args, "O!I", fast_block_type, &block, &length) ||
	    fast_received((struct traffic *)self, (struct block *)block, length))
		return NULL;
	Py_RETURN_NONE;
}

/* ---- the type ---------------------------------------------------------------------------------- */

static PyObject **members_of(struct traffic *traffic, int which)
{
	PyObject **all[] = {&traffic->counts,       &traffic->queue,   &traffic->shelf,
			    &traffic->account,      &traffic->inbox,   &traffic->offers,
			    &traffic->message_type, &traffic->waiting, &traffic->controls,
			    &traffic->collected};

	return which < (int)(sizeof(all) / sizeof(all[0])) ? all[which] : NULL;
}

static int traffic_traverse(PyObject *self, visitproc visit, void *arg)
{
	PyObject **member;

	Py_VISIT(Py_TYPE(self));
	for (int i = 0; (member = members_of((struct traffic *)self, i)); i++)
		Py_VISIT(*member);
	return 0;
}

static int traffic_clear(PyObject *self)
{
	PyObject **member;

	((struct traffic *)self)->started = ((struct traffic *)self)->takes = 0;
	for (int i = 0; (member = members_of((struct traffic *)self, i)); i++)
		Py_CLEAR(*member);
	return 0;
}

static void traffic_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	traffic_clear(self);
	fast_free(self);
}

/* Everything that the rest takes for granted. */
static PyObject *traffic_begin(PyObject *self, PyObject *unused)
{
	struct traffic *traffic = (struct traffic *)self;

	(void)unused;
	if (!traffic->queue || !PyObject_IsInstance(traffic->queue, (PyObject *)fast_queue_type) ||
	    !traffic->shelf || !PyObject_TypeCheck(traffic->shelf, fast_shelf_type) ||
	    !traffic->account || !PyObject_TypeCheck(traffic->account, fast_account_type) ||
	    !traffic->inbox || !PyObject_TypeCheck(traffic->inbox, fast_inbox_type) ||
	    !traffic->offers || !PyObject_TypeCheck(traffic->offers, fast_offers_type) ||
	    !traffic->message_type || !PyType_Check(traffic->message_type) ||
	    !PyType_IsSubtype((PyTypeObject *)traffic->message_type, fast_message_type) ||
	    !traffic->counts || !PyObject_TypeCheck(traffic->counts, fast_counts_type) ||
	    !traffic->waiting || !traffic->controls) {
		PyErr_SetString(PyExc_TypeError, "something is missing, or not what it should be");
		return NULL;
	}
	traffic->started = 1;
	Py_RETURN_NONE;
}

static PyMemberDef traffic_members[] = {
	{"counts", T_OBJECT_EX, offsetof(struct traffic, counts), 0, NULL},
	{"queue", T_OBJECT_EX, offsetof(struct traffic, queue), 0, NULL},
	{"shelf", T_OBJECT_EX, offsetof(struct traffic, shelf), 0, NULL},
	{"account", T_OBJECT_EX, offsetof(struct traffic, account), 0, NULL},
	{"inbox", T_OBJECT_EX, offsetof(struct traffic, inbox), 0, NULL},
	{"offers", T_OBJECT_EX, offsetof(struct traffic, offers), 0, NULL},
	{"message_type", T_OBJECT_EX, offsetof(struct traffic, message_type), 0, NULL},
	{"waiting", T_OBJECT_EX, offsetof(struct traffic, waiting), 0, NULL},
	{"controls", T_OBJECT_EX, offsetof(struct traffic, controls), 0, NULL},
	{"under_way", T_UINT, offsetof(struct traffic, under_way), READONLY, NULL},
	{"peer_size", T_UINT, offsetof(struct traffic, peer_size), 0, NULL},
	{"sent", T_UINT, offsetof(struct traffic, sent), 0, NULL},
	{"used", T_UINT, offsetof(struct traffic, used), 0, NULL},
	{"fitted", T_UINT, offsetof(struct traffic, fitted), 0, NULL},
	{"oversized", T_UINT, offsetof(struct traffic, oversized), 0, NULL},
	{"large_size", T_UINT, offsetof(struct traffic, large_size), 0, NULL},
	{"longest", T_ULONGLONG, offsetof(struct traffic, longest), 0, NULL},
	{"reposted", T_UINT, offsetof(struct traffic, reposted), 0, NULL},
	{"small_size", T_UINT, offsetof(struct traffic, small_size), 0, NULL},
	{"receive_size", T_UINT, offsetof(struct traffic, receive_size), 0, NULL},
	{"patience", T_UINT, offsetof(struct traffic, patience), 0, NULL},
	{"started", T_BOOL, offsetof(struct traffic, started), READONLY, NULL},
	{"max_message", T_ULONGLONG, offsetof(struct traffic, max_message), 0, NULL},
	{"closing", T_BOOL, offsetof(struct traffic, closing), 0, NULL},
	{"ended", T_BOOL, offsetof(struct traffic, ended), 0, NULL},
	{"takes", T_BOOL, offsetof(struct traffic, takes), 0, NULL},
	{"blocked", T_BOOL, offsetof(struct traffic, blocked), 0, NULL},
	{"counting", T_BOOL, offsetof(struct traffic, counting), 0, NULL},
	{"grown", T_BOOL, offsetof(struct traffic, grown), 0, NULL},
	{"watching", T_BOOL, offsetof(struct traffic, watching), 0, NULL},
	{"parting", T_BOOL, offsetof(struct traffic, parting), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef traffic_methods[] = {
	{"begin", traffic_begin, METH_NOARGS, NULL},
	{"pump", traffic_pump, METH_NOARGS, NULL},
	{"collect", traffic_collect, METH_NOARGS, NULL},
	{"collect_soon", traffic_collect_soon, METH_NOARGS, NULL},
	{"post", traffic_post, METH_VARARGS, NULL},
	{"post_offer", fast_post_offer, METH_VARARGS, NULL},
	{"offer_over", fast_traffic_offer_over, METH_VARARGS, NULL},
	{"request_id", fast_request_id, METH_NOARGS, NULL},
	{"answer", fast_answer, METH_O, NULL},
	{"offered", fast_traffic_offered, METH_O, NULL},
	{"take_frame", traffic_take_frame, METH_VARARGS, NULL},
	{"deliver", (PyCFunction)(void (*)(void))traffic_deliver, METH_FASTCALL, NULL},
	{"new_promise", traffic_new_promise, METH_NOARGS, NULL},
	{"send_plainly", (PyCFunction)(void (*)(void))traffic_send_plainly, METH_FASTCALL, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot traffic_slots[] = {
	{Py_tp_doc, "The two-sided traffic of a connection."},
	{Py_tp_members, traffic_members},
	{Py_tp_methods, traffic_methods},
	{Py_tp_traverse, traffic_traverse},
	{Py_tp_clear, traffic_clear},
	{Py_tp_dealloc, traffic_dealloc},
	{0, NULL},
};

static PyType_Spec traffic_spec = {
	.name = "aiordma._native._fast.Traffic",
	.basicsize = sizeof(struct traffic),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = traffic_slots,
};

int fast_add_traffic(PyObject *module)
{
	const struct {
		PyObject **string;
		const char *text;
	} names[] = {
		{&str_append, "append"},
		{&str_appendleft, "appendleft"},
		{&str_popleft, "popleft"},
		{&str_collect, "collect"},
		{&str_call_soon, "call_soon"},
		{&str_send_first, "_send_first"},
		{&str_pump_controls, "_pump_controls"},
		{&str_parted, "_check_drained"},
		{&str_sent, "_count_sent"},
	};

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		*names[i].string = PyUnicode_InternFromString(names[i].text);
		if (!*names[i].string)
			return -1;
	}
	fast_traffic_type = fast_add_type(module, &traffic_spec);
	return fast_traffic_type ? 0 : -1;
}
