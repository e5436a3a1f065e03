/* How a promise that is over calls back.
 *
 * An asyncio.Future that is set calls back in the next turn of the loop: a handle, a turn, a system
 * call, and all of that between an answer that is here and the task that wants it.  But a drain is
 * called by the loop itself, with no task running; so what it settles is called back at its end.  Then
 * the next turn of the loop passes while the next answer is on its way.  What is settled from anywhere
 * else is called back by the loop, as ever.
 */
#include "promise.h"

static PyObject *str_call_soon, *str_run, *str_handler, *str_done, *str_set_result,
	*str_set_exception;

PyObject *fast_loop_of(PyObject *table)
{
	PyObject *loop = ((struct table *)table)->loop;

	if (!loop)
		PyErr_SetString(PyExc_RuntimeError, "a table without a loop");
	return loop;
}

int fast_call_soon(struct promise *promise, PyObject *callback, PyObject *context)
{
	PyObject *loop = fast_loop_of(promise->table);
	PyObject *method = loop ? PyObject_GetAttr(loop, str_call_soon) : NULL;
	PyObject *args = method ? PyTuple_Pack(2, callback, promise) : NULL;
	PyObject *keywords = args ? Py_BuildValue("{sO}", "context", context) : NULL;
	PyObject *handle = keywords ? PyObject_Call(method, args, keywords) : NULL;

	Py_XDECREF(method);
	Py_XDECREF(args);
	Py_XDECREF(keywords);
	Py_XDECREF(handle);
	return handle ? 0 : -1;
}

static int each(struct promise *promise,
		int (*call)(struct promise *, PyObject *callback, PyObject *context))
{
	PyObject *callback = promise->callback, *context = promise->context, *more = promise->more;
	int rc = 0;

	promise->callback = promise->context = promise->more = NULL;
	if (callback)
		rc = call(promise, callback, context);
	for (Py_ssize_t i = 0; more && i < PyList_Size(more); i++) {
		PyObject *pair = PyList_GetItem(more, i);

		if (call(promise, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1)))
			rc = -1;
	}
	Py_XDECREF(callback);
	Py_XDECREF(context);
	Py_XDECREF(more);
	return rc;
}

/* As the loop does it with what a callback raises. */
static int handle_exception(struct promise *promise)
{
	PyObject *type, *value, *traceback;

	if (!PyErr_ExceptionMatches(PyExc_Exception))
		return -1;
	PyErr_Fetch(&type, &value, &traceback);
	PyErr_NormalizeException(&type, &value, &traceback);
	if (traceback)
		PyException_SetTraceback(value, traceback);
	PyObject *about = Py_BuildValue("{sssO}", "message", "Exception in a callback of aiordma's",
					"exception", value);
	PyObject *loop = about ? fast_loop_of(promise->table) : NULL;
	PyObject *told = loop ? PyObject_CallMethodObjArgs(loop, str_handler, about, NULL) : NULL;

	Py_XDECREF(about);
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(traceback);
	Py_XDECREF(told);
	return told ? 0 : -1;
}

/* Is it what asyncio's own task goes on by?  It has no other name than this one. */
static bool is_wakeup(PyObject *callback)
{
	static PyCFunction wakeup;

	if (Py_TYPE(callback) != &PyCFunction_Type)
		return false;
	PyCFunction function = PyCFunction_GetFunction(callback);

	if (wakeup || !function)
		return function == wakeup && wakeup;
	PyObject *name = PyObject_GetAttrString(callback, "__name__");

	if (name && PyUnicode_CompareWithASCIIString(name, "task_wakeup") == 0)
		wakeup = function;
	if (!name)
		PyErr_Clear();
	Py_XDECREF(name);
	return wakeup;
}

/* A future of asyncio's that has ended well: borrowed; NULL if there is no memory for one. */
static PyObject *ended_well(struct table *table)
{
	if (table->ended)
		return table->ended;
	PyObject *loop = fast_loop_of((PyObject *)table);
	PyObject *future = loop ? PyObject_CallMethod(loop, "create_future", NULL) : NULL;
	PyObject *set =
		future ? PyObject_CallMethodObjArgs(future, str_set_result, Py_None, NULL) : NULL;

	if (set)
		table->ended = future;
	else
		Py_XDECREF(future);
	Py_XDECREF(set);
	PyErr_Clear();
	return table->ended;
}

/* A task asks what calls it for its result: that of a future of asyncio's it knows where to find, which
 * takes a twentieth of a call by name.  What it then goes on in is the promise itself. */
static int call_now(struct promise *promise, PyObject *callback, PyObject *context)
{
	PyObject *ended = promise->state == PROMISE_DONE && is_wakeup(callback)
				  ? ended_well((struct table *)promise->table)
				  : NULL;
	PyObject *caller = ended ? ended : (PyObject *)promise;
	PyObject *done = PyObject_CallMethodObjArgs(context, str_run, callback, caller, NULL);

	Py_XDECREF(done);
	return done ? 0 : handle_exception(promise);
}

bool fast_is_here(const struct table *table)
{
	return table->waking && table->thread == PyThread_get_thread_ident();
}

void fast_wake(struct table *table, struct raised *raised)
{
	char waking = table->waking;

	if (!table->woken_count || waking)
		return;
	table->waking = !table->later;
	table->thread = PyThread_get_thread_ident();
	for (uint32_t i = 0; i < table->woken_count; i++) {
		struct promise *promise = (struct promise *)table->woken[i];

		table->woken[i] = NULL;
		if (each(promise, table->later ? fast_call_soon : call_now)) {
			if (raised->type)
				PyErr_WriteUnraisable((PyObject *)promise);
			else
				PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
		}
		Py_DECREF((PyObject *)promise);
	}
	table->woken_count = 0;
	table->waking = 0;
}

static int remember(struct table *table, struct promise *promise)
{
	if (table->woken_count == table->woken_room) {
		uint32_t room = table->woken_room ? 2 * table->woken_room : 64;
		PyObject **woken = PyMem_Realloc(table->woken, room * sizeof(*woken));

		if (!woken) {
			PyErr_NoMemory();
			return -1;
		}
		table->woken = woken;
		table->woken_room = room;
	}
	Py_INCREF((PyObject *)promise);
	table->woken[table->woken_count++] = (PyObject *)promise;
	return 0;
}

int fast_settle(struct promise *promise, char state, PyObject *what)
{
	struct table *table = (struct table *)promise->table;

	if (promise->state != PROMISE_PENDING)
		return 0;
	promise->state = state;
	Py_XINCREF(what);
	promise->what = what;
	if (!promise->callback)
		return 0;
	table->waiting--;
	return table->draining && state != PROMISE_CANCELLED ? remember(table, promise)
							     : each(promise, fast_call_soon);
}

/* ---- waiters of any kind ----------------------------------------------------------------------- */

int fast_is_over(PyObject *waiter)
{
	if (Py_TYPE(waiter) == fast_promise_type)
		return ((struct promise *)waiter)->state != PROMISE_PENDING;
	PyObject *done = PyObject_CallMethodObjArgs(waiter, str_done, NULL);
	int over = done ? PyObject_IsTrue(done) : -1;

	Py_XDECREF(done);
	return over;
}

int fast_tell(PyObject *waiter, PyObject *error)
{
	if (Py_TYPE(waiter) == fast_promise_type)
		return fast_settle((struct promise *)waiter, error ? PROMISE_FAILED : PROMISE_DONE,
				   error);
	int over = fast_is_over(waiter);

	if (over)
		return over < 0 ? -1 : 0;
	PyObject *told = PyObject_CallMethodObjArgs(
		waiter, error ? str_set_exception : str_set_result, error ? error : Py_None, NULL);
	Py_XDECREF(told);
	return told ? 0 : -1;
}

int fast_intern_wake(void)
{
	str_call_soon = PyUnicode_InternFromString("call_soon");
	str_run = PyUnicode_InternFromString("run");
	str_handler = PyUnicode_InternFromString("call_exception_handler");
	str_done = PyUnicode_InternFromString("done");
	str_set_result = PyUnicode_InternFromString("set_result");
	str_set_exception = PyUnicode_InternFromString("set_exception");
	return str_call_soon && str_run && str_handler && str_done && str_set_result &&
			       str_set_exception
		       ? 0
		       : -1;
}
