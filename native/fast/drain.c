/* Dispatches completions: each finds its slot and its work without a search.
 *
 * Successful work is settled at once: a run and a frame settle their waiters, a receive goes to the
 * traffic of its queue pair, `done` of other work is called.  Failed work goes to the queue's
 * `_went_wrong`, once for each completion.  After all completions, `_use_room` of each queue whose send
 * queue has got entries back is called once, or its traffic sends.  Last, the callbacks of all settled
 * promises run (promise.c).
 *
 * Exceptions of these go to the queue's `_broken`: a bug in the handling of one queue pair must not
 * cost the others their completions.  BaseExceptions (KeyboardInterrupt) leave the drain at its end.
 */
#include <limits.h>

#include "fetch.h"
#include "run.h"

enum {
	BATCH = 128
};

static int (*native_drain)(struct aiordma_drain *, struct aiordma_completion *, int, int *);

static PyObject *str_done, *str_written, *str_went_wrong, *str_use_room, *str_broken,
	*str_call_soon;

static void report(struct queue *queue, struct raised *raised)
{
	struct raised now;

	if (!PyErr_ExceptionMatches(PyExc_Exception)) {
		if (raised->type)
			PyErr_WriteUnraisable((PyObject *)queue);
		else
			PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
		return;
	}
	PyErr_Fetch(&now.type, &now.value, &now.traceback);
	PyErr_NormalizeException(&now.type, &now.value, &now.traceback);
	if (now.traceback)
		PyException_SetTraceback(now.value, now.traceback);
	PyObject *told = PyObject_CallMethodObjArgs((PyObject *)queue, str_broken, now.value, NULL);

	if (!told)
		PyErr_WriteUnraisable((PyObject *)queue);
	Py_XDECREF(told);
	Py_XDECREF(now.type);
	Py_XDECREF(now.value);
	Py_XDECREF(now.traceback);
}

static PyObject *none_unless(int rc)
{
	if (rc)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *call_written(PyObject *traffic, PyObject *block,
			      const struct aiordma_completion *wc)
{
	PyObject *length = PyLong_FromUnsignedLong(wc->byte_len);
	PyObject *imm = PyLong_FromUnsignedLong(wc->imm_data);
	PyObject *done = length && imm ? PyObject_CallMethodObjArgs(traffic, str_written, block,
								    length, imm, NULL)
				       : NULL;

	Py_XDECREF(length);
	Py_XDECREF(imm);
	return done;
}

static PyObject *receive(PyObject *traffic, PyObject *block, const struct aiordma_completion *wc)
{
	PyObject *done;

	if (!traffic) {
		PyErr_SetString(PyExc_TypeError, "a receive on a queue without traffic");
		return NULL;
	}
	Py_INCREF(traffic); /* what it calls may let it go */
	if (wc->wc_flags & IBV_WC_WITH_IMM)
		done = call_written(traffic, block, wc);
	else if (PyObject_TypeCheck(traffic, fast_traffic_type))
		done = none_unless(fast_received((struct traffic *)traffic, (struct block *)block,
						 wc->byte_len));
	else
		done = PyObject_CallMethod(traffic, "received", "OI", block, wc->byte_len);
	Py_DECREF(traffic);
	return done;
}

static PyObject *call_done(PyObject *work, const struct aiordma_completion *wc)
{
	PyObject *length = PyLong_FromUnsignedLong(wc->byte_len);
	PyObject *done = length ? PyObject_CallMethodObjArgs(work, str_done, length, NULL) : NULL;

	Py_XDECREF(length);
	return done;
}

static PyObject *complete(struct held held, const struct aiordma_completion *wc, bool is_receive)
{
	if (is_receive)
		return receive(held.queue->traffic, held.work, wc);
	if (Py_TYPE(held.work) == fast_frame_type)
		return none_unless(fast_frame_done((struct frame *)held.work));
	if (PyObject_TypeCheck(held.work, fast_run_type))
		return fast_finish_run((struct run *)held.work);
	if (Py_TYPE(held.work) == fast_fetch_type)
		return none_unless(fast_fetch_done((struct fetch *)held.work));
	return call_done(held.work, wc);
}

static PyObject *went_wrong(struct held held, const struct aiordma_completion *wc, uint8_t kind,
			    bool earlier)
{
	PyObject *facts =
		Py_BuildValue("(BIIKO)", kind, wc->status, wc->vendor_err,
			      (unsigned long long)wc->wr_id, earlier ? Py_True : Py_False);
	PyObject *told = NULL;

	if (facts)
		told = PyObject_CallMethodObjArgs((PyObject *)held.queue, str_went_wrong, held.work,
						  facts, NULL);
	Py_XDECREF(facts);
	return told;
}

/* The failure of an earlier request of a run, whose last one is still to complete. */
static void one_before(struct table *table, const struct aiordma_completion *wc,
		       struct raised *raised)
{
	struct slot *slot = wc->wr_id & AIORDMA_EARLIER && wc->status
				    ? fast_find_slot(table, wc->wr_id ^ AIORDMA_EARLIER)
				    : NULL;

	if (!slot) {
		table->stray++;
		return;
	}
	struct held held = {.queue = slot->queue, .work = slot->work};

	Py_INCREF((PyObject *)held.queue);
	Py_INCREF(held.work);
	PyObject *told = went_wrong(held, wc, slot->kind, true);
	if (!told)
		report(held.queue, raised);
	Py_XDECREF(told);
	fast_drop(held);
}

/* A reference to the queue if its send queue has got entries back; or NULL. */
static struct queue *dispatch(struct table *table, const struct aiordma_completion *wc,
			      struct raised *raised)
{
	struct slot *slot = fast_find_slot(table, wc->wr_id);

	if (!slot) {
		one_before(table, wc, raised);
		return NULL;
	}
	uint8_t kind = slot->kind;
	bool is_receive = kind == KIND_RECV;
	bool in_turn = is_receive || slot->previous == NO_SLOT;
	struct held held = fast_free_slot(table, slot);
	struct queue *queue = held.queue;
	PyObject *done;

	if (!in_turn) {
		PyErr_Format(PyExc_RuntimeError,
			     "the completion of wr_id %#llx overtook those before it",
			     (unsigned long long)wc->wr_id);
		done = NULL;
	} else if (wc->status || queue->failed) {
		done = went_wrong(held, wc, kind, false);
	} else {
		queue->completions++;
		done = complete(held, wc, is_receive);
	}
	if (!done)
		report(queue, raised);
	Py_XDECREF(done);
	bool tell = !is_receive && !queue->touched && !queue->failed;

	if (tell) {
		queue->touched = 1;
		Py_INCREF((PyObject *)queue);
	}
	fast_drop(held);
	return tell ? queue : NULL;
}

static PyObject *use_room(struct queue *queue)
{
	PyObject *traffic = queue->traffic;

	if (queue->backlogged || queue->watched || !traffic ||
	    !PyObject_TypeCheck(traffic, fast_traffic_type))
		return PyObject_CallMethodObjArgs((PyObject *)queue, str_use_room, NULL);
	Py_INCREF(traffic);
	PyObject *done = none_unless(fast_pump((struct traffic *)traffic));
	Py_DECREF(traffic);
	return done;
}

static void tell_room(struct queue *queue, struct raised *raised)
{
	queue->touched = 0;
	if (!queue->failed) {
		PyObject *told = use_room(queue);

		if (!told)
			report(queue, raised);
		Py_XDECREF(told);
	}
	Py_DECREF((PyObject *)queue);
}

enum {
	RAISED = INT_MIN
};

/* An outcome, as of Table.drain, or RAISED with an exception. */
static int drain(struct table *table, struct aiordma_drain *state, long most, uint32_t spin_us,
		 bool returns)
{
	struct aiordma_completion completions[BATCH];
	struct queue *with_room[BATCH];
	struct raised raised = {NULL, NULL, NULL};
	int rooms = 0, more, n;

	if (most < 1 || most > BATCH) {
		PyErr_Format(PyExc_ValueError, "%ld completions in one crossing, not 1 to %d", most,
			     BATCH);
		return RAISED;
	}
	state->spin_us = spin_us;
	state->polls_again = returns;
	if (!table->later) /* the loop has its turn */
		table->looks = FAST_LOOKS;
	Py_BEGIN_ALLOW_THREADS n = native_drain(state, completions, (int)most, &more);
	Py_END_ALLOW_THREADS table->draining = 1;
	for (int i = 0; i < n; i++) {
		struct queue *queue = dispatch(table, &completions[i], &raised);

		if (queue)
			with_room[rooms++] = queue;
	}
	for (int i = 0; i < rooms; i++)
		tell_room(with_room[i], &raised);
	table->draining = 0;
	fast_wake(table, &raised);
	if (raised.type) {
		PyErr_Restore(raised.type, raised.value, raised.traceback);
		return RAISED;
	}
	return n < 0 ? n
		     : (n > 0 || state->busy) | (more ? 2 : 0) |
			       (state->notify_fds_changed ? 4 : 0);
}

PyObject *fast_drain(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	if (count != 4) {
		PyErr_SetString(PyExc_TypeError,
				"a channel's state, a number, microseconds, and whether to return");
		return NULL;
	}
	struct aiordma_drain *state = PyLong_AsVoidPtr(args[0]);
	long most = PyLong_AsLong(args[1]);
	unsigned long spin_us = PyLong_AsUnsignedLong(args[2]);
	long returns = PyLong_AsLong(args[3]);

	if (PyErr_Occurred())
		return NULL;
	int outcome = drain((struct table *)self, state, most, (uint32_t)spin_us, returns);

	return outcome == RAISED ? NULL : PyLong_FromLong(outcome);
}

/* The arguments that a channel's reader passes to a drain. */
struct reader {
	struct aiordma_drain *state;
	long most;
	PyObject *leaving;   /* a list */
	PyObject *otherwise; /* what a drain says is for it, unless there is nothing to it */
};

static bool read_by(struct reader *reader, PyObject *const *args, Py_ssize_t count,
		    Py_ssize_t wanted)
{
	if (count != wanted || !PyList_Check(args[2])) {
		PyErr_SetString(PyExc_TypeError,
				"a channel's state, a number, a list, what to call");
		return false;
	}
	*reader = (struct reader){
		.state = PyLong_AsVoidPtr(args[0]),
		.most = PyLong_AsLong(args[1]),
		.leaving = args[2],
		.otherwise = args[3],
	};
	return !PyErr_Occurred();
}

static PyObject *serve(struct table *table, PyObject *const *args, Py_ssize_t count, bool returns)
{
	struct reader reader;

	if (!read_by(&reader, args, count, 5))
		return NULL;
	unsigned long spin_us = PyLong_AsUnsignedLong(args[4]);

	if (PyErr_Occurred())
		return NULL;
	if (table->closed)
		Py_RETURN_NONE;
	int outcome = drain(table, reader.state, reader.most, (uint32_t)spin_us, returns);

	if (outcome == RAISED)
		return NULL;
	if ((outcome == 0 || outcome == 1) && PyList_Size(reader.leaving) == 0)
		Py_RETURN_NONE;
	return PyObject_CallFunction(reader.otherwise, "i", outcome);
}

PyObject *fast_serve(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	return serve((struct table *)self, args, count, false);
}

PyObject *fast_look_again(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct table *table = (struct table *)self;

	table->later = 1;
	PyObject *done = serve(table, args, count, table->returns || table->looking);

	table->later = 0;
	return done;
}

PyObject *fast_look_soon(PyObject *self, PyObject *unused)
{
	struct table *table = (struct table *)self;

	(void)unused;
	if (!table->keep || table->keep == Py_None)
		Py_RETURN_NONE; /* the table is closed */
	PyObject *handle =
		PyObject_CallMethodObjArgs(table->loop, str_call_soon, table->keep, NULL);

	if (!handle)
		return NULL;
	Py_DECREF(handle);
	table->looking = 1;
	Py_RETURN_NONE;
}

PyObject *fast_keep_looking(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct table *table = (struct table *)self;
	struct reader reader;
	char around = table->returns;

	table->looking = 0;
	if (!read_by(&reader, args, count, 4))
		return NULL;
	if (table->closed)
		Py_RETURN_NONE;
	table->returns = 1;
	int outcome = drain(table, reader.state, reader.most, table->keep_us, true);

	table->returns = around;
	if (outcome == RAISED)
		return NULL;
	if (outcome != 1 || PyList_Size(reader.leaving))
		return PyObject_CallFunction(reader.otherwise, "i", outcome);
	table->found = 1;
	return fast_look_soon(self, NULL);
}

static PyObject *connect_native(PyObject *module, PyObject *address)
{
	void *drain = PyLong_AsVoidPtr(address);

	(void)module;
	if (PyErr_Occurred())
		return NULL;
	*(void **)&native_drain = drain;
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{"connect", connect_native, METH_O, "By the address of aiordma_drain."},
	{NULL, NULL, 0, NULL},
};

int fast_add_drain(PyObject *module)
{
	str_done = PyUnicode_InternFromString("done");
	str_written = PyUnicode_InternFromString("written");
	str_went_wrong = PyUnicode_InternFromString("_went_wrong");
	str_use_room = PyUnicode_InternFromString("_use_room");
	str_broken = PyUnicode_InternFromString("_broken");
	str_call_soon = PyUnicode_InternFromString("call_soon");
	if (!str_done || !str_written || !str_went_wrong || !str_use_room || !str_broken ||
	    !str_call_soon)
		return -1;
	return PyModule_AddFunctions(module, functions);
}
