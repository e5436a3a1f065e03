/* `async for message in connection`: the messages of an inbox, one after another.
 *
 * Each step is an awaitable.  When it is first awaited it takes the buffered message, or continues as
 * Python's coroutine for all other cases: waiting, the wrong loop, the end.  A step that is not awaited
 * takes nothing.
 */
#include "traffic.h"

struct arrivals {
	PyObject_HEAD
	PyObject *inbox;
	PyObject *otherwise; /* makes that coroutine */
};

struct step {
	PyObject_HEAD
	PyObject *arrivals;
	PyObject *waiting; /* the coroutine, if it has come to that */
	char begun;
};

static PyTypeObject *arrivals_type, *step_type;

/* ---- a step ------------------------------------------------------------------------------------ */

/* Once only.  -1 with an exception. */
static int step_begin(struct step *step)
{
	if (step->begun) {
		PyErr_SetString(PyExc_RuntimeError, "this step has been awaited already");
		return -1;
	}
	step->begun = 1;
	return 0;
}

static int step_wait(struct step *step)
{
	step->waiting = PyObject_CallNoArgs(((struct arrivals *)step->arrivals)->otherwise);
	return step->waiting ? 0 : -1;
}

static PySendResult step_go(PyObject *self, PyObject *sent, PyObject **result)
{
	struct step *step = (struct step *)self;

	*result = NULL;
	if (!step->waiting) {
		if (step_begin(step))
			return PYGEN_ERROR;
		*result =
			fast_take_here((struct inbox *)((struct arrivals *)step->arrivals)->inbox);
		if (*result != Py_None)
			return *result ? PYGEN_RETURN : PYGEN_ERROR;
		Py_CLEAR(*result);
		if (step_wait(step))
			return PYGEN_ERROR;
	}
	return PyIter_Send(step->waiting, sent, result);
}

static PyObject *step_send(PyObject *self, PyObject *sent)
{
	PyObject *result;

	if (step_go(self, sent, &result) != PYGEN_RETURN)
		return result;
	PyObject *end = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);

	if (end)
		PyErr_SetObject(PyExc_StopIteration, end);
	Py_XDECREF(end);
	Py_DECREF(result);
	return NULL;
}

static PyObject *step_next(PyObject *self)
{
	return step_send(self, Py_None);
}

/* Thrown into the coroutine; what has not begun ends with it. */
static PyObject *step_throw(PyObject *self, PyObject *args)
{
	struct step *step = (struct step *)self;

	if (!step->waiting && (step_begin(step) || step_wait(step)))
		return NULL;
	PyObject *throw = PyObject_GetAttrString(step->waiting, "throw");
	PyObject *thrown = throw ? PyObject_CallObject(throw, args) : NULL;

	Py_XDECREF(throw);
	return thrown;
}

static PyObject *step_close(PyObject *self, PyObject *unused)
{
	struct step *step = (struct step *)self;

	(void)unused;
	step->begun = 1;
	if (step->waiting)
		return PyObject_CallMethod(step->waiting, "close", NULL);
	Py_RETURN_NONE;
}

static int step_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct step *)self)->arrivals);
	Py_VISIT(((struct step *)self)->waiting);
	return 0;
}

static int step_clear(PyObject *self)
{
	Py_CLEAR(((struct step *)self)->waiting);
	return 0;
}

static void step_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	step_clear(self);
	Py_CLEAR(((struct step *)self)->arrivals);
	fast_free(self);
}

static PyMethodDef step_methods[] = {
	{"send", step_send, METH_O, NULL},
	{"throw", step_throw, METH_VARARGS, NULL},
	{"close", step_close, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot step_slots[] = {
	{Py_tp_doc, "The next message."}, {Py_tp_methods, step_methods},
	{Py_am_await, Py_NewRef},         {Py_am_send, step_go},
	{Py_tp_iter, Py_NewRef},          {Py_tp_iternext, step_next},
	{Py_tp_traverse, step_traverse},  {Py_tp_clear, step_clear},
	{Py_tp_dealloc, step_dealloc},    {0, NULL},
};

static PyType_Spec step_spec = {
	.name = "aiordma._native._fast.Step",
	.basicsize = sizeof(struct step),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
	.slots = step_slots,
};

/* ---- all of them ------------------------------------------------------------------------------- */

static PyObject *arrivals_next(PyObject *self)
{
	static allocfunc alloc;

	if (!alloc)
		alloc = (allocfunc)PyType_GetSlot(step_type, Py_tp_alloc);
	struct step *step = (struct step *)alloc(step_type, 0);

	if (step)
		step->arrivals = Py_NewRef(self);
	return (PyObject *)step;
}

static PyObject *arrivals_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	PyObject *inbox, *otherwise;

	if (fast_no_keywords(keywords) ||
	    !PyArg_ParseTuple(args, "O!O", fast_inbox_type, &inbox, &otherwise))
		return NULL;
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct arrivals *arrivals = (struct arrivals *)alloc(type, 0);

	if (arrivals) {
		arrivals->inbox = Py_NewRef(inbox);
		arrivals->otherwise = Py_NewRef(otherwise);
	}
	return (PyObject *)arrivals;
}

static int arrivals_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct arrivals *)self)->inbox);
	Py_VISIT(((struct arrivals *)self)->otherwise);
	return 0;
}

static void arrivals_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	Py_CLEAR(((struct arrivals *)self)->inbox);
	Py_CLEAR(((struct arrivals *)self)->otherwise);
	fast_free(self);
}

static PyType_Slot arrivals_slots[] = {
	{Py_tp_doc, "The messages of a connection, one after another."},
	{Py_tp_new, arrivals_new},
	{Py_am_aiter, Py_NewRef},
	{Py_am_anext, arrivals_next},
	{Py_tp_traverse, arrivals_traverse},
	{Py_tp_dealloc, arrivals_dealloc},
	{0, NULL},
};

static PyType_Spec arrivals_spec = {
	.name = "aiordma._native._fast.Arrivals",
	.basicsize = sizeof(struct arrivals),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = arrivals_slots,
};

int fast_add_arrivals(PyObject *module)
{
	step_type = fast_add_type(module, &step_spec);
	arrivals_type = step_type ? fast_add_type(module, &arrivals_spec) : NULL;
	return arrivals_type ? 0 : -1;
}
