/* Messages that have arrived, in order, and the receivers that wait for them: the common case.
 *
 * The base of aiordma/_transport/inbox.py.  The common case is a buffered message for the receiver that
 * has waited longest, or for a task that comes while no receiver waits.  fetch.c reads offered messages;
 * Python handles receivers with memory of their own.
 */
#include "traffic.h"

PyTypeObject *fast_inbox_type;

static PyObject *str_append, *str_popleft, *str_ahead, *str_on_taken;

/* The one that waits longest looks. */
static int wake_first(struct inbox *inbox)
{
	while (PyObject_Size(inbox->receivers) > 0) {
		PyObject *receiver =
			PyObject_CallMethodObjArgs(inbox->receivers, str_popleft, NULL);

		if (!receiver)
			return -1;
		int over = fast_is_over(receiver), rc = 0;

		if (!over) {
			inbox->woken++;
			rc = fast_tell(receiver, NULL);
		}
		Py_DECREF(receiver);
		if (!over || rc || over < 0)
			return rc || over < 0 ? -1 : 0;
	}
	return 0;
}

/* A new reference to the first, if it is a message that is here; NULL, perhaps with an exception. */
static PyObject *first_message(struct inbox *inbox)
{
	if (PyObject_Size(inbox->incoming) <= 0)
		return NULL;
	PyObject *first = PySequence_GetItem(inbox->incoming, 0);

	if (first && !PyObject_TypeCheck(first, fast_message_type))
		Py_CLEAR(first);
	return first;
}

/* 1 if a receiver should look, -1 with an exception. */
static int ready(struct inbox *inbox)
{
	if (inbox->ended)
		return 1;
	if (!inbox->offers)
		return PyObject_Size(inbox->incoming) > 0;
	PyObject *first = first_message(inbox);
	int there = first != NULL;

	Py_XDECREF(first);
	return there ? 1 : PyErr_Occurred() ? -1 : 0;
}

static int wake_if_ready(struct inbox *inbox)
{
	if (PyObject_Size(inbox->receivers) <= 0)
		return 0;
	int there = ready(inbox);

	return there > 0 ? wake_first(inbox) : there;
}

int fast_arrived(struct inbox *inbox, PyObject *message)
{
	int rc = fast_call(inbox->incoming, str_append, message);

	Py_DECREF(message);
	if (rc)
		return -1;
	return wake_if_ready(inbox);
}

/* It is worth while to post receives again. */
static int refill(struct inbox *inbox)
{
	PyObject *traffic = inbox->traffic;

	if (traffic && PyObject_TypeCheck(traffic, fast_traffic_type)) {
		int rc = fast_refill((struct traffic *)traffic, &inbox->taken);

		if (rc || !inbox->taken)
			return rc;
	}
	return fast_call((PyObject *)inbox, str_on_taken, NULL);
}

/* What follows from taking the first one. */
static int went(struct inbox *inbox, bool last)
{
	if (last && !inbox->ended && ++inbox->taken >= inbox->refill && refill(inbox))
		return -1;
	if (inbox->unstarted && fast_call((PyObject *)inbox, str_ahead, NULL))
		return -1;
	return wake_if_ready(inbox);
}

/* The first one leaves, if it is a message that is here; NULL, perhaps with an exception. */
static PyObject *pop_message(struct inbox *inbox)
{
	PyObject *first;

	if (inbox->offers) {
		first = first_message(inbox);
		if (first && fast_call(inbox->incoming, str_popleft, NULL))
			Py_CLEAR(first);
		return first;
	}
	if (PyObject_Size(inbox->incoming) <= 0)
		return NULL;
	first = PyObject_CallMethodObjArgs(inbox->incoming, str_popleft, NULL);
	if (first && !PyObject_TypeCheck(first, fast_message_type)) {
		Py_CLEAR(first);
		PyErr_SetString(PyExc_TypeError, "offers are counted");
	}
	return first;
}

static PyObject *take(struct inbox *inbox)
{
	PyObject *message = pop_message(inbox);

	if (!message) {
		if (PyErr_Occurred())
			return NULL;
		Py_RETURN_NONE;
	}
	struct counts *counts = (struct counts *)inbox->counts;

	if (counts) {
		counts->messages_received++;
		counts->bytes_received += ((struct message *)message)->length;
	}
	if (((struct message *)message)->fetched)
		inbox->ahead -= ((struct message *)message)->length;
	if (went(inbox, ((struct message *)message)->last)) {
		Py_DECREF(message);
		return NULL;
	}
	return message;
}

static PyObject *inbox_take(PyObject *self, PyObject *unused)
{
	struct inbox *inbox = (struct inbox *)self;

	(void)unused;
	if (inbox->woken || PyObject_Size(inbox->receivers) > 0)
		Py_RETURN_NONE;
	return take(inbox);
}

static bool is_here(PyObject *self)
{
	PyObject *table = ((struct inbox *)self)->table;

	return table && fast_is_here((struct table *)table);
}

PyObject *fast_take_here(struct inbox *inbox)
{
	if (!is_here((PyObject *)inbox))
		Py_RETURN_NONE;
	return inbox_take((PyObject *)inbox, NULL);
}

static PyObject *inbox_take_here(PyObject *self, PyObject *unused)
{
	(void)unused;
	return fast_take_here((struct inbox *)self);
}

static int inbox_set_counts(PyObject *self, PyObject *value, void *unused)
{
	struct inbox *inbox = (struct inbox *)self;
	PyObject *before = inbox->counts;

	(void)unused;
	if (!value || !PyObject_TypeCheck(value, fast_counts_type)) {
		PyErr_SetString(PyExc_TypeError, "counts are wanted");
		return -1;
	}
	Py_INCREF(value);
	inbox->counts = value;
	Py_XDECREF(before);
	return 0;
}

static PyObject *inbox_get_counts(PyObject *self, void *unused)
{
	PyObject *counts = ((struct inbox *)self)->counts;

	(void)unused;
	if (!counts)
		counts = Py_None;
	Py_INCREF(counts);
	return counts;
}

static PyObject *inbox_take_in_turn(PyObject *self, PyObject *unused)
{
	struct inbox *inbox = (struct inbox *)self;

	(void)unused;
	inbox->woken--;
	return take(inbox);
}

static PyObject *inbox_take_first(PyObject *self, PyObject *unused)
{
	(void)unused;
	return take((struct inbox *)self);
}

int fast_put_message(struct inbox *inbox, PyObject *offered, PyObject *message)
{
	Py_ssize_t all = PyObject_Size(inbox->incoming);

	for (Py_ssize_t i = 0; i < all; i++) {
		PyObject *here = PySequence_GetItem(inbox->incoming, i);

		Py_XDECREF(here); /* the deque has it */
		if (!here)
			return -1;
		if (here != offered)
			continue;
		if (PySequence_SetItem(inbox->incoming, i, message))
			return -1;
		((struct message *)message)->fetched = 1;
		inbox->offers--;
		return wake_if_ready(inbox);
	}
	PyErr_SetString(PyExc_ValueError, "it was not offered here");
	return -1;
}

static PyObject *inbox_went(PyObject *self, PyObject *last)
{
	if (went((struct inbox *)self, PyObject_IsTrue(last) == 1))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *inbox_wake_first(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (wake_first((struct inbox *)self))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *inbox_wait(PyObject *self, PyObject *unused)
{
	struct inbox *inbox = (struct inbox *)self;

	(void)unused;
	if (inbox->ended || inbox->woken || inbox->unstarted || PyObject_Size(inbox->receivers) > 0)
		Py_RETURN_NONE;
	int there = ready(inbox);

	if (there < 0)
		return NULL;
	if (there)
		Py_RETURN_NONE;
	struct promise *promise = fast_new_promise(inbox->table);

	if (promise && fast_call(inbox->receivers, str_append, (PyObject *)promise))
		Py_CLEAR(promise);
	return (PyObject *)promise;
}

static PyObject *inbox_wait_here(PyObject *self, PyObject *unused)
{
	if (!is_here(self))
		Py_RETURN_NONE;
	return inbox_wait(self, unused);
}

static PyObject *inbox_add(PyObject *self, PyObject *message)
{
	Py_INCREF(message);
	if (fast_arrived((struct inbox *)self, message))
		return NULL;
	Py_RETURN_NONE;
}

static int inbox_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct inbox *inbox = (struct inbox *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(inbox->incoming);
	Py_VISIT(inbox->receivers);
	Py_VISIT(inbox->table);
	Py_VISIT(inbox->counts);
	Py_VISIT(inbox->traffic);
	return 0;
}

static int inbox_clear(PyObject *self)
{
	struct inbox *inbox = (struct inbox *)self;

	Py_CLEAR(inbox->incoming);
	Py_CLEAR(inbox->receivers);
	Py_CLEAR(inbox->table);
	Py_CLEAR(inbox->counts);
	Py_CLEAR(inbox->traffic);
	return 0;
}

static void inbox_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	inbox_clear(self);
	fast_free(self);
}

static PyMemberDef inbox_members[] = {
	{"incoming", T_OBJECT_EX, offsetof(struct inbox, incoming), 0, NULL},
	{"receivers", T_OBJECT_EX, offsetof(struct inbox, receivers), 0, NULL},
	{"table", T_OBJECT_EX, offsetof(struct inbox, table), 0, NULL},
	{"traffic", T_OBJECT, offsetof(struct inbox, traffic), 0, NULL},
	{"woken", T_UINT, offsetof(struct inbox, woken), 0, NULL},
	{"offers", T_UINT, offsetof(struct inbox, offers), 0, NULL},
	{"unstarted", T_UINT, offsetof(struct inbox, unstarted), 0, NULL},
	{"ahead", T_ULONGLONG, offsetof(struct inbox, ahead), 0, NULL},
	{"most_ahead", T_ULONGLONG, offsetof(struct inbox, most_ahead), 0, NULL},
	{"taken", T_UINT, offsetof(struct inbox, taken), 0, NULL},
	{"refill", T_UINT, offsetof(struct inbox, refill), 0, NULL},
	{"ended", T_BOOL, offsetof(struct inbox, ended), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef inbox_getset[] = {
	{"counts", inbox_get_counts, inbox_set_counts, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef inbox_methods[] = {
	{"take", inbox_take, METH_NOARGS, NULL},
	{"take_here", inbox_take_here, METH_NOARGS, NULL},
	{"take_in_turn", inbox_take_in_turn, METH_NOARGS, NULL},
	{"take_first", inbox_take_first, METH_NOARGS, NULL},
	{"went", inbox_went, METH_O, NULL},
	{"wait", inbox_wait, METH_NOARGS, NULL},
	{"wait_here", inbox_wait_here, METH_NOARGS, NULL},
	{"add", inbox_add, METH_O, NULL},
	{"wake_first", inbox_wake_first, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot inbox_slots[] = {
	{Py_tp_doc, "Messages that have arrived."},
	{Py_tp_members, inbox_members},
	{Py_tp_getset, inbox_getset},
	{Py_tp_methods, inbox_methods},
	{Py_tp_traverse, inbox_traverse},
	{Py_tp_clear, inbox_clear},
	{Py_tp_dealloc, inbox_dealloc},
	{0, NULL},
};

static PyType_Spec inbox_spec = {
	.name = "aiordma._native._fast.Inbox",
	.basicsize = sizeof(struct inbox),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = inbox_slots,
};

int fast_add_inbox(PyObject *module)
{
	str_append = PyUnicode_InternFromString("append");
	str_popleft = PyUnicode_InternFromString("popleft");
	str_ahead = PyUnicode_InternFromString("_fetch_ahead");
	str_on_taken = PyUnicode_InternFromString("_tell_taken");
	if (!str_append || !str_popleft || !str_ahead || !str_on_taken)
		return -1;
	fast_inbox_type = fast_add_type(module, &inbox_spec);
	return fast_inbox_type ? 0 : -1;
}
