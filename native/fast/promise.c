/* A future for one task, which the drain calls back.
 *
 * How it calls back: wake.c.  What a task does before it waits: look.c.
 *
 * It does what a task, and asyncio's functions for futures, ask of a future; nothing else of it is
 * offered to users.  A failure that is not asked for is dropped.
 */
#include "promise.h"

PyTypeObject *fast_promise_type;

/* ---- what a future does ------------------------------------------------------------------------ */

static PyObject *from_asyncio(const char *name)
{
	PyObject *asyncio = PyImport_ImportModule("asyncio");
	PyObject *found = asyncio ? PyObject_GetAttrString(asyncio, name) : NULL;

	Py_XDECREF(asyncio);
	return found;
}

static PyObject *make_named(const char *name, PyObject *argument)
{
	PyObject *error = from_asyncio(name);
	PyObject *made = NULL;

	if (error)
		made = argument && argument != Py_None
			       ? PyObject_CallFunctionObjArgs(error, argument, NULL)
			       : PyObject_CallNoArgs(error);
	Py_XDECREF(error);
	return made;
}

static PyObject *raise_named(const char *name, PyObject *argument)
{
	PyObject *made = make_named(name, argument);

	if (made)
		PyErr_SetObject((PyObject *)Py_TYPE(made), made);
	Py_XDECREF(made);
	return NULL;
}

/* None, or what it failed with as an exception. */
static PyObject *outcome(struct promise *promise)
{
	switch (promise->state) {
	case PROMISE_DONE:
		Py_RETURN_NONE;
	case PROMISE_FAILED:
		PyErr_SetObject((PyObject *)Py_TYPE(promise->what), promise->what);
		return NULL;
	case PROMISE_CANCELLED:
		return raise_named("CancelledError", promise->what);
	default:
		return raise_named("InvalidStateError", NULL);
	}
}

static PyObject *promise_result(PyObject *self, PyObject *unused)
{
	(void)unused;
	return outcome((struct promise *)self);
}

static PyObject *promise_exception(PyObject *self, PyObject *unused)
{
	struct promise *promise = (struct promise *)self;

	(void)unused;
	if (promise->state != PROMISE_FAILED)
		return outcome(promise);
	Py_INCREF(promise->what);
	return promise->what;
}

/* asyncio.gather asks for these two. */
static PyObject *promise_cancelled_error(PyObject *self, PyObject *unused)
{
	(void)unused;
	return make_named("CancelledError", ((struct promise *)self)->what);
}

static PyObject *promise_cancel_message(PyObject *self, void *unused)
{
	PyObject *what = ((struct promise *)self)->what;

	(void)unused;
	if (!what)
		what = Py_None;
	Py_INCREF(what);
	return what;
}

static PyObject *promise_done(PyObject *self, PyObject *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct promise *)self)->state != PROMISE_PENDING);
}

static PyObject *promise_cancelled(PyObject *self, PyObject *unused)
{
	(void)unused;
	return PyBool_FromLong(((struct promise *)self)->state == PROMISE_CANCELLED);
}

/* Of at most one keyword: *value is borrowed, NULL if it is not there.  -1 with an exception. */
static int keyword(PyObject *names, const char *name, PyObject *given, PyObject **value)
{
	*value = NULL;
	if (!names || PyTuple_Size(names) == 0)
		return 0;
	if (PyTuple_Size(names) == 1 &&
	    PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), name) == 0) {
		*value = given;
		return 0;
	}
	PyErr_Format(PyExc_TypeError, "the only keyword is %s", name);
	return -1;
}

static PyObject *promise_cancel(PyObject *self, PyObject *const *args, Py_ssize_t count,
				PyObject *names)
{
	struct promise *promise = (struct promise *)self;
	PyObject *message;

	if (keyword(names, "msg", names ? args[count] : NULL, &message))
		return NULL;
	if (count > 1 || (count && message)) {
		PyErr_SetString(PyExc_TypeError, "one message");
		return NULL;
	}
	if (promise->state != PROMISE_PENDING)
		Py_RETURN_FALSE;
	if (fast_settle(promise, PROMISE_CANCELLED, count ? args[0] : message))
		return NULL;
	if (promise->sends && promise->target) {
		PyObject *done = PyObject_CallMethod(promise->target, "withdraw", "O", promise);

		if (!done)
			return NULL;
		Py_DECREF(done);
	}
	Py_RETURN_TRUE;
}

static PyObject *this_context(void)
{
	static PyObject *copy;

	if (!copy) {
		PyObject *module = PyImport_ImportModule("contextvars");

		copy = module ? PyObject_GetAttrString(module, "copy_context") : NULL;
		Py_XDECREF(module);
	}
	return copy ? PyObject_CallNoArgs(copy) : NULL;
}

static PyObject *promise_add(PyObject *self, PyObject *const *args, Py_ssize_t count,
			     PyObject *names)
{
	struct promise *promise = (struct promise *)self;
	PyObject *context;

	if (keyword(names, "context", names ? args[count] : NULL, &context))
		return NULL;
	if (count != 1) {
		PyErr_SetString(PyExc_TypeError, "one callback");
		return NULL;
	}
	if (context && context != Py_None)
		Py_INCREF(context);
	else
		context = this_context();
	if (!context)
		return NULL;
	int rc = 0;

	if (promise->state != PROMISE_PENDING) {
		rc = fast_call_soon(promise, args[0], context);
	} else if (!promise->callback) {
		Py_INCREF(args[0]);
		promise->callback = args[0];
		Py_INCREF(context);
		promise->context = context;
		((struct table *)promise->table)->waiting++;
	} else {
		PyObject *pair = PyTuple_Pack(2, args[0], context);

		if (!promise->more)
			promise->more = PyList_New(0);
		rc = pair && promise->more ? PyList_Append(promise->more, pair) : -1;
		Py_XDECREF(pair);
	}
	Py_DECREF(context);
	if (rc)
		return NULL;
	Py_RETURN_NONE;
}

/* The first one gives its place to the one behind it. */
static int remove_first(struct promise *promise)
{
	PyObject *callback = promise->callback, *context = promise->context;

	promise->callback = promise->context = NULL;
	if (promise->more && PyList_Size(promise->more)) {
		PyObject *pair = PyList_GetItem(promise->more, 0);

		promise->callback = PyTuple_GetItem(pair, 0);
		promise->context = PyTuple_GetItem(pair, 1);
		Py_INCREF(promise->callback);
		Py_INCREF(promise->context);
	}
	Py_DECREF(callback);
	Py_DECREF(context);
	if (promise->callback)
		return PyList_SetSlice(promise->more, 0, 1, NULL);
	if (promise->state == PROMISE_PENDING)
		((struct table *)promise->table)->waiting--;
	return 0;
}

static PyObject *promise_remove(PyObject *self, PyObject *callback)
{
	struct promise *promise = (struct promise *)self;
	long removed = 0;
	int same = 0;

	while (promise->callback &&
	       (same = PyObject_RichCompareBool(promise->callback, callback, Py_EQ)) == 1) {
		if (remove_first(promise))
			return NULL;
		removed++;
	}
	for (Py_ssize_t i = 0; same >= 0 && promise->more && i < PyList_Size(promise->more);) {
		PyObject *other = PyTuple_GetItem(PyList_GetItem(promise->more, i), 0);

		same = PyObject_RichCompareBool(other, callback, Py_EQ);
		if (same <= 0)
			i++;
		else if (PyList_SetSlice(promise->more, i, i + 1, NULL))
			return NULL;
		else
			removed++;
	}
	return same < 0 ? NULL : PyLong_FromLong(removed);
}

static PyObject *promise_loop(PyObject *self, PyObject *unused)
{
	PyObject *loop = fast_loop_of(((struct promise *)self)->table);

	(void)unused;
	Py_XINCREF(loop);
	return loop;
}

static PyObject *promise_set_result(PyObject *self, PyObject *result)
{
	(void)result;
	if (fast_settle((struct promise *)self, PROMISE_DONE, NULL))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *promise_set_exception(PyObject *self, PyObject *error)
{
	if (fast_settle((struct promise *)self, PROMISE_FAILED, error))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *promise_next(PyObject *self)
{
	struct promise *promise = (struct promise *)self;

	if (promise->state == PROMISE_PENDING && fast_look(promise))
		return NULL;
	if (promise->state == PROMISE_PENDING) {
		promise->blocking = 1;
		Py_INCREF(self);
		return self;
	}
	PyObject *result = outcome(promise);

	Py_XDECREF(result);
	return NULL; /* no exception: the end, with None */
}

/* ---- the type ---------------------------------------------------------------------------------- */

struct promise *fast_new_promise(PyObject *table)
{
	static allocfunc alloc;

	if (!alloc)
		alloc = (allocfunc)PyType_GetSlot(fast_promise_type, Py_tp_alloc);
	struct promise *promise = (struct promise *)alloc(fast_promise_type, 0);

	if (promise) {
		Py_INCREF(table);
		promise->table = table;
	}
	return promise;
}

static PyObject *promise_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	PyObject *table;

	(void)type;
	if (fast_no_keywords(keywords) || !PyArg_ParseTuple(args, "O!", fast_table_type, &table))
		return NULL;
	return (PyObject *)fast_new_promise(table);
}

static int promise_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct promise *promise = (struct promise *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(promise->table);
	Py_VISIT(promise->what);
	Py_VISIT(promise->callback);
	Py_VISIT(promise->context);
	Py_VISIT(promise->more);
	Py_VISIT(promise->target);
	return 0;
}

static int promise_clear(PyObject *self)
{
	struct promise *promise = (struct promise *)self;

	if (promise->callback && promise->state == PROMISE_PENDING)
		((struct table *)promise->table)->waiting--;
	Py_CLEAR(promise->what);
	Py_CLEAR(promise->callback);
	Py_CLEAR(promise->context);
	Py_CLEAR(promise->more);
	Py_CLEAR(promise->target);
	return 0;
}

static void promise_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	promise_clear(self);
	Py_CLEAR(((struct promise *)self)->table);
	fast_free(self);
}

static PyMemberDef promise_members[] = {
	{"_asyncio_future_blocking", T_BOOL, offsetof(struct promise, blocking), 0, NULL},
	{"target", T_OBJECT, offsetof(struct promise, target), 0, NULL},
	{"sends", T_BOOL, offsetof(struct promise, sends), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef promise_getset[] = {
	{"_cancel_message", promise_cancel_message, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

#define WITH_KEYWORDS(function)                                                                    \
	(PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

static PyMethodDef promise_methods[] = {
	{"result", promise_result, METH_NOARGS, NULL},
	{"_make_cancelled_error", promise_cancelled_error, METH_NOARGS, NULL},
	{"exception", promise_exception, METH_NOARGS, NULL},
	{"done", promise_done, METH_NOARGS, NULL},
	{"cancelled", promise_cancelled, METH_NOARGS, NULL},
	{"cancel", WITH_KEYWORDS(promise_cancel), NULL},
	{"add_done_callback", WITH_KEYWORDS(promise_add), NULL},
	{"remove_done_callback", promise_remove, METH_O, NULL},
	{"get_loop", promise_loop, METH_NOARGS, NULL},
	{"set_result", promise_set_result, METH_O, NULL},
	{"set_exception", promise_set_exception, METH_O, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot promise_slots[] = {
	{Py_tp_doc, "What one task waits for."},
	{Py_tp_new, promise_new},
	{Py_tp_members, promise_members},
	{Py_tp_getset, promise_getset},
	{Py_tp_methods, promise_methods},
	{Py_am_await, Py_NewRef},
	{Py_tp_iter, Py_NewRef},
	{Py_tp_iternext, promise_next},
	{Py_tp_traverse, promise_traverse},
	{Py_tp_clear, promise_clear},
	{Py_tp_dealloc, promise_dealloc},
	{0, NULL},
};

static PyType_Spec promise_spec = {
	.name = "aiordma._native._fast.Promise",
	.basicsize = sizeof(struct promise),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = promise_slots,
};

int fast_add_promise(PyObject *module)
{
	if (fast_intern_wake())
		return -1;
	fast_promise_type = fast_add_type(module, &promise_spec);
	return fast_promise_type ? 0 : -1;
}
