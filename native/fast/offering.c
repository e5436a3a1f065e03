/* What one side has offered and the peer has not answered for: memory that it may read until then.
 *
 * The base of aiordma/_transport/offers.py, which opens what is not plain.  Plain is memory of which it is
 * certain that it has no holes, on a device that pins nothing: then a registration is a few words.
 *
 * Each message has a registration of its own, for the peer knows the key, and must not read what the
 * memory holds after the message.  It ends with the answer, or with the queue pair, and always before the
 * protection domain, which otherwise cannot (ibv_dealloc_pd(3)).  The object is pinned as long.
 */
#include <errno.h>
#include <pthread.h>

#include "traffic.h"

PyTypeObject *fast_offers_type;

static PyObject *str_obj;
static PyTypeObject *array_type;

/* How many forks this process is away from the first: what was registered before is the parent's. */
static unsigned int forks;

struct offered {
	struct offered *next;
	struct ibv_mr *mr;
	struct parcel parcel;
	PyObject *waiter;
	uint32_t request_id;
};

static void forked(void)
{
	forks++;
}

bool fast_offers_full(const struct offers *offers)
{
	return offers->count >= offers->most;
}

/* ---- in the list ------------------------------------------------------------------------------- */

/* Takes over the parcel. */
static void hold(struct offers *offers, struct offered *offered, uint32_t request_id,
		 struct ibv_mr *mr, struct parcel *parcel, PyObject *waiter)
{
	offered->request_id = request_id;
	offered->mr = mr;
	fast_move_parcel(&offered->parcel, parcel);
	Py_INCREF(waiter);
	offered->waiter = waiter;
	*offers->end = offered;
	offers->end = &offered->next;
	offers->count++;
}

/* Peers acknowledge in order unless they read ahead: it is nearly always the first. */
static struct offered *take_out(struct offers *offers, uint32_t request_id)
{
	struct offered **place = &offers->first;

	while (*place && (*place)->request_id != request_id)
		place = &(*place)->next;
	struct offered *found = *place;

	if (found) {
		*place = found->next;
		if (!found->next)
			offers->end = place;
		offers->count--;
	}
	return found;
}

/* The peer may read it no more: 0, or an errno value. */
static int deregister(const struct offers *offers, struct ibv_mr *mr)
{
	if (offers->forks != forks)
		return 0;
	/* Where pages are pinned, letting go of them takes a while. */
	PyThreadState *others = offers->register_own ? NULL : PyEval_SaveThread();

	errno = 0;
	int rc = offers->deregister(mr);

	if (rc == -1) /* as some providers have it */
		rc = errno ? errno : EIO;
	if (others)
		PyEval_RestoreThread(others);
	return rc < 0 ? -rc : rc;
}

/* The same, and the object is let go.  The waiter has yet to be told, and let go. */
static int finish(const struct offers *offers, struct offered *offered)
{
	int code = deregister(offers, offered->mr);

	fast_close_parcel(&offered->parcel);
	return code;
}

/* Of the last of them that failed. */
static int finish_all(struct offers *offers)
{
	int code = 0;

	while (offers->first) {
		struct offered *offered = take_out(offers, offers->first->request_id);
		int rc = finish(offers, offered);

		Py_DECREF(offered->waiter);
		PyMem_Free(offered);
		if (rc)
			code = rc;
	}
	return code;
}

static int not_closed(struct offers *offers, int code)
{
	PyObject *told = PyObject_CallMethod((PyObject *)offers, "_not_closed", "i", code);

	Py_XDECREF(told);
	return told ? 0 : -1;
}

/* ---- offering ---------------------------------------------------------------------------------- */

/* Of aiordma/verbs/memory_region.py's `is_there` what is the same in a few steps. */
static bool has_no_holes(PyObject *owner)
{
	return PyBytes_CheckExact(owner) || PyByteArray_CheckExact(owner) ||
	       Py_TYPE(owner) == array_type || PyObject_TypeCheck(owner, fast_block_type);
}

/* 1, 0, or -1 with an exception. */
static int is_there(PyObject *source)
{
	if (!PyMemoryView_Check(source))
		return has_no_holes(source);
	PyObject *owner = PyObject_GetAttr(source, str_obj);
	int there = owner ? has_no_holes(owner) : -1;

	Py_XDECREF(owner);
	return there;
}

/* NULL, perhaps without an exception: then Python tries again, and says what is wrong. */
static struct offered *open_plainly(struct offers *offers, uint32_t request_id,
				    struct parcel *parcel, PyObject *waiter)
{
	struct offered *offered = PyMem_Calloc(1, sizeof(*offered));

	if (!offered) {
		PyErr_NoMemory();
		return NULL;
	}
	struct ibv_mr *mr = offers->register_own(offers->domain, (void *)parcel->bytes,
						 parcel->length, IBV_ACCESS_REMOTE_READ);

	if (!mr) {
		PyMem_Free(offered);
		return NULL;
	}
	hold(offers, offered, request_id, mr, parcel, waiter);
	return offered;
}

static uint32_t next_request(struct traffic *traffic)
{
	traffic->latest_request = traffic->latest_request % UINT32_MAX + 1;
	return traffic->latest_request;
}

int fast_offer(struct traffic *traffic, struct parcel *parcel, PyObject *waiter)
{
	struct offers *offers = (struct offers *)traffic->offers;

	if (!offers->register_own || offers->forks != forks || !parcel->length)
		return 0;
	int there = is_there(parcel->source);
	struct block *block = there > 0 ? fast_frame_block(traffic, OFFER_ROOM) : NULL;

	if (!block)
		return PyErr_Occurred() ? -1 : 0;
	struct offered *offered = open_plainly(offers, next_request(traffic), parcel, waiter);
	int rc = PyErr_Occurred() ? -1 : 0;

	if (offered) {
		const struct offer offer = {
			.request_id = offered->request_id,
			.address = (uintptr_t)offered->parcel.bytes,
			.rkey = offered->mr->rkey,
			.length = offered->parcel.length,
			.imm = offered->parcel.imm,
			.has_imm = offered->parcel.has_imm,
		};

		rc = fast_send_offer(traffic, block, &offer) ? -1 : 1;
	} else {
		fast_release_block(block);
	}
	Py_DECREF((PyObject *)block);
	return rc;
}

int fast_offer_over(struct traffic *traffic, uint32_t request_id, PyObject *error)
{
	struct offers *offers = (struct offers *)traffic->offers;
	struct offered *offered = offers ? take_out(offers, request_id) : NULL;

	if (!offered)
		return 0;
	int code = finish(offers, offered);

	if (!error)
		fast_count_sent(traffic, 1, offered->parcel.length);
	int rc = fast_tell(offered->waiter, error) ? -1 : 1;

	Py_DECREF(offered->waiter);
	PyMem_Free(offered);
	if (rc > 0 && code && not_closed(offers, code))
		rc = -1;
	return rc;
}

PyObject *fast_traffic_offer_over(PyObject *self, PyObject *args)
{
	unsigned int request_id;
	PyObject *error;

	if (!PyArg_ParseTuple(args, "IO", &request_id, &error))
		return NULL;
	int rc = fast_offer_over((struct traffic *)self, request_id,
				 error == Py_None ? NULL : error);

	return rc < 0 ? NULL : PyBool_FromLong(rc);
}

PyObject *fast_request_id(PyObject *self, PyObject *unused)
{
	(void)unused;
	return PyLong_FromUnsignedLong(next_request((struct traffic *)self));
}

/* ---- the type ---------------------------------------------------------------------------------- */

static int offers_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	struct offers *offers = (struct offers *)self;
	unsigned long long domain, register_own, deregister_any;
	unsigned int most;

	if (fast_no_keywords(keywords) ||
	    !PyArg_ParseTuple(args, "IKKK", &most, &domain, &register_own, &deregister_any))
		return -1;
	if (offers->end) {
		PyErr_SetString(PyExc_TypeError, "once is enough");
		return -1;
	}
	offers->end = &offers->first;
	offers->most = most;
	offers->forks = forks;
	offers->domain = (struct ibv_pd *)(uintptr_t)domain;
	*(void **)&offers->register_own = (void *)(uintptr_t)register_own;
	*(void **)&offers->deregister = (void *)(uintptr_t)deregister_any;
	return 0;
}

static PyObject *offers_hold(PyObject *self, PyObject *args)
{
	struct offers *offers = (struct offers *)self;
	struct outgoing *outgoing;
	unsigned long long mr;
	unsigned int request_id;

	if (!PyArg_ParseTuple(args, "IKO!", &request_id, &mr, fast_outgoing_type, &outgoing))
		return NULL;
	if (!offers->end || !outgoing->parcel.source) {
		PyErr_SetString(PyExc_ValueError, "a message is offered once");
		return NULL;
	}
	struct offered *offered = PyMem_Calloc(1, sizeof(*offered));

	if (!offered)
		return PyErr_NoMemory();
	hold(offers, offered, request_id, (struct ibv_mr *)(uintptr_t)mr, &outgoing->parcel,
	     outgoing->waiter);
	Py_RETURN_NONE;
}

static PyObject *offers_close(PyObject *self, PyObject *unused)
{
	struct offers *offers = (struct offers *)self;

	(void)unused;
	int code = finish_all(offers);

	offers->register_own = NULL; /* nothing is opened any more */
	if (code && not_closed(offers, code))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *offers_futures(PyObject *self, void *unused)
{
	PyObject *all = PyList_New(0);

	(void)unused;
	for (struct offered *offered = ((struct offers *)self)->first; all && offered;
	     offered = offered->next)
		if (PyList_Append(all, offered->waiter))
			Py_CLEAR(all);
	return all;
}

static PyObject *offers_full(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(fast_offers_full((struct offers *)self));
}

static Py_ssize_t offers_length(PyObject *self)
{
	return ((struct offers *)self)->count;
}

/* Not what is offered itself: the garbage collector must not take a view apart whose memory a peer may
 * still read. */
static int offers_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	for (struct offered *offered = ((struct offers *)self)->first; offered;
	     offered = offered->next)
		Py_VISIT(offered->waiter);
	return 0;
}

static int offers_clear(PyObject *self)
{
	finish_all((struct offers *)self);
	return 0;
}

static void offers_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	offers_clear(self);
	fast_free(self);
}

static PyGetSetDef offers_getset[] = {
	{"full", offers_full, NULL, NULL, NULL},
	{"futures", offers_futures, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef offers_methods[] = {
	{"hold", offers_hold, METH_VARARGS, NULL},
	{"close", offers_close, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot offers_slots[] = {
	{Py_tp_doc, "What has been offered and not answered for."},
	{Py_tp_init, offers_init},
	{Py_tp_getset, offers_getset},
	{Py_tp_methods, offers_methods},
	{Py_sq_length, offers_length},
	{Py_tp_traverse, offers_traverse},
	{Py_tp_clear, offers_clear},
	{Py_tp_dealloc, offers_dealloc},
	{0, NULL},
};

static PyType_Spec offers_spec = {
	.name = "aiordma._native._fast.Offers",
	.basicsize = sizeof(struct offers),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = offers_slots,
};

static int find_array_type(void)
{
	PyObject *module = PyImport_ImportModule("array");

	array_type = module ? (PyTypeObject *)PyObject_GetAttrString(module, "array") : NULL;
	Py_XDECREF(module);
	return array_type ? 0 : -1;
}

int fast_add_offers(PyObject *module)
{
	int rc = pthread_atfork(NULL, NULL, forked);

	if (rc) {
		errno = rc;
		PyErr_SetFromErrno(PyExc_OSError);
		return -1;
	}
	str_obj = PyUnicode_InternFromString("obj");
	if (!str_obj || find_array_type())
		return -1;
	fast_offers_type = fast_add_type(module, &offers_spec);
	return fast_offers_type ? 0 : -1;
}
