/* Many one-sided requests as one: posted with one doorbell, completed by the last.
 *
 * A send queue works in order, and a completion says that everything before it is done too
 * (ibv_post_send(3), IBTA volume 1, clause 10.8.6).  So only the last request of a run is signaled,
 * and all of them count as under way until then.  If one before fails it completes nevertheless:
 * every request has the run's wr_id, all but the last with AIORDMA_EARLIER in it.  Such a completion
 * is the run's failure but not its end, since the requests behind it are flushed one by one, and the
 * last of these is the last that the device knows of their memory.
 */
#include <string.h>

#include "promise.h"
#include "run.h"

enum {
	RIGHT_WRITE = IBV_ACCESS_REMOTE_WRITE,
	RIGHT_READ = IBV_ACCESS_REMOTE_READ,
};

PyTypeObject *fast_run_type;

static void free_arrays(struct run *run)
{
	if (run->room <= 1)
		return;
	PyMem_Free(run->sends);
	PyMem_Free(run->sges);
	PyMem_Free(run->pins);
}

/* For `wanted` entries in all: 0, or -1 with MemoryError. */
static int make_room(struct run *run, uint32_t wanted)
{
	if (wanted <= run->room)
		return 0;
	if (wanted == 1) {
		run->sends = &run->one_send;
		run->sges = &run->one_sge;
		run->pins = &run->one_pin;
		run->room = 1;
		return 0;
	}
	uint32_t room = wanted < 8 ? 8 : wanted + wanted / 2;
	struct aiordma_send *sends = PyMem_Malloc(room * sizeof(*sends));
	struct ibv_sge *sges = PyMem_Malloc(room * sizeof(*sges));
	PyObject **pins = PyMem_Malloc(room * sizeof(PyObject *));

	if (!sends || !sges || !pins) {
		PyMem_Free(sends);
		PyMem_Free(sges);
		PyMem_Free(pins);
		PyErr_NoMemory();
		return -1;
	}
	if (run->count) {
		memcpy(sends, run->sends, run->count * sizeof(*sends));
		memcpy(sges, run->sges, run->count * sizeof(*sges));
		memcpy(pins, run->pins, run->count * sizeof(*pins));
	}
	free_arrays(run);
	run->sends = sends;
	run->sges = sges;
	run->pins = pins;
	run->room = room;
	return 0;
}

/* A zeroed request at the end, which pins what it is given; NULL with MemoryError. */
static struct aiordma_send *append(struct run *run, PyObject *pinned, struct ibv_sge sge)
{
	if (make_room(run, run->count + 1))
		return NULL;
	struct aiordma_send *send = &run->sends[run->count];

	memset(send, 0, sizeof(*send));
	send->num_sge = sge.length ? 1 : 0;
	run->sges[run->count] = sge;
	Py_INCREF(pinned);
	((struct pinned *)pinned)->pins++;
	run->pins[run->count] = pinned;
	run->count++;
	return send;
}

/* ---- what is plain ----------------------------------------------------------------------------- */

int fast_add_transfer(struct run *run, PyObject *here, PyObject *there, enum ibv_wr_opcode opcode)
{
	unsigned int right = opcode == IBV_WR_RDMA_WRITE ? RIGHT_WRITE : RIGHT_READ;

	if (!PyObject_TypeCheck(here, fast_local_type) ||
	    !PyObject_TypeCheck(there, fast_remote_type))
		return 0;
	struct local *local = (struct local *)here;
	struct remote *remote = (struct remote *)there;
	struct local *owner = fast_local_root(local);
	struct remote *region = fast_remote_root(remote);

	if (owner->gone || !owner->pinned || !PyObject_TypeCheck(owner->pinned, fast_pinned_type) ||
	    !region->usable || !region->user || region->user != run->user ||
	    !(remote->rights & right) || (opcode == IBV_WR_RDMA_READ && !owner->writable) ||
	    local->length != remote->length || !local->length ||
	    local->length > AIORDMA_TRANSFER_SIZE)
		return 0;
	struct aiordma_send *send = append(run, owner->pinned,
					   (struct ibv_sge){.addr = local->address,
							    .length = (uint32_t)local->length,
							    .lkey = local->lkey});
	if (!send)
		return -1;
	send->opcode = opcode;
	send->remote_addr = remote->address;
	send->rkey = remote->rkey;
	return 1;
}

static PyObject *answer(int rc)
{
	return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static int takes(Py_ssize_t given, Py_ssize_t wanted)
{
	if (given == wanted)
		return 1;
	PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
	return 0;
}

static PyObject *run_write(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	if (!takes(count, 2))
		return NULL;
	return answer(fast_add_transfer((struct run *)self, args[0], args[1], IBV_WR_RDMA_WRITE));
}

static PyObject *run_read(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	if (!takes(count, 2))
		return NULL;
	return answer(fast_add_transfer((struct run *)self, args[0], args[1], IBV_WR_RDMA_READ));
}

/* ---- what Python has looked at ---------------------------------------------------------------- */

static PyObject *run_put(PyObject *self, PyObject *args)
{
	unsigned int opcode, length, lkey, rkey, imm;
	unsigned long long address, remote_address, compare_add = 0, swap = 0;
	PyObject *pinned;

	if (!PyArg_ParseTuple(args, "IO!KIIKII|KK", &opcode, fast_pinned_type, &pinned, &address,
			      &length, &lkey, &remote_address, &rkey, &imm, &compare_add, &swap))
		return NULL;
	struct aiordma_send *send =
		append((struct run *)self, pinned,
		       (struct ibv_sge){.addr = address, .length = length, .lkey = lkey});
	if (!send)
		return NULL;
	send->opcode = opcode;
	send->remote_addr = remote_address;
	send->rkey = rkey;
	send->imm_data = imm;
	send->compare_add = compare_add;
	send->swap = swap;
	Py_RETURN_NONE;
}

/* ---- life --------------------------------------------------------------------------------------- */

static PyObject *run_part(PyObject *self, PyObject *args)
{
	struct run *run = (struct run *)self;
	unsigned int count;

	if (!PyArg_ParseTuple(args, "I", &count))
		return NULL;
	if (!count || count > run->count) {
		PyErr_Format(PyExc_ValueError, "%u requests of %u", count, run->count);
		return NULL;
	}
	struct run *part = fast_new_run(run->user, run->kind);

	if (!part || make_room(part, count)) {
		Py_XDECREF((PyObject *)part);
		return NULL;
	}
	Py_XINCREF(run->waiter);
	part->waiter = run->waiter;
	part->partial = 1;
	memcpy(part->sends, run->sends, count * sizeof(*part->sends));
	memcpy(part->sges, run->sges, count * sizeof(*part->sges));
	memcpy(part->pins, run->pins, count * sizeof(*part->pins));
	part->count = count;
	run->count -= count;
	memmove(run->sends, run->sends + count, run->count * sizeof(*part->sends));
	memmove(run->sges, run->sges + count, run->count * sizeof(*part->sges));
	memmove(run->pins, run->pins + count, run->count * sizeof(*part->pins));
	return (PyObject *)part;
}

void fast_number_run(struct run *run, uint64_t wr_id)
{
	for (uint32_t i = 0; i < run->count; i++) {
		bool last = i + 1 == run->count;

		run->sends[i].wr_id = last ? wr_id : wr_id | AIORDMA_EARLIER;
		run->sends[i].send_flags = last ? IBV_SEND_SIGNALED : 0;
		run->sends[i].first_sge = i;
	}
}

static void let_go(struct run *run)
{
	for (uint32_t i = 0; i < run->count; i++) {
		PyObject *pinned = run->pins[i];

		if (!pinned)
			continue;
		run->pins[i] = NULL;
		fast_unpin(pinned);
		Py_DECREF(pinned);
	}
}

/* Tells the waiter, unless it is over. */
static PyObject *tell(struct run *run, PyObject *error)
{
	if (run->waiter && run->waiter != Py_None && fast_tell(run->waiter, error))
		return NULL;
	Py_RETURN_NONE;
}

PyObject *fast_finish_run(struct run *run)
{
	let_go(run);
	if (run->partial)
		Py_RETURN_NONE;
	return tell(run, NULL);
}

static PyObject *run_failed(PyObject *self, PyObject *error)
{
	return tell((struct run *)self, error);
}

static PyObject *run_release(PyObject *self, PyObject *unused)
{
	(void)unused;
	let_go((struct run *)self);
	Py_RETURN_NONE;
}

static PyObject *run_lengths(PyObject *self, void *unused)
{
	struct run *run = (struct run *)self;
	PyObject *list = PyList_New(run->count);

	(void)unused;
	for (uint32_t i = 0; list && i < run->count; i++) {
		PyObject *length = PyLong_FromUnsignedLong(run->sges[i].length);

		if (!length || PyList_SetItem(list, i, length))
			Py_CLEAR(list);
	}
	return list;
}

static int run_init(PyObject *self, PyObject *args, PyObject *keywords)
{
	static char *names[] = {"user", "kind", "waiter", NULL};
	struct run *run = (struct run *)self;
	PyObject *user, *waiter = NULL;

	if (run->user || run->count) {
		PyErr_SetString(PyExc_TypeError, "once is enough");
		return -1;
	}
	if (!PyArg_ParseTupleAndKeywords(args, keywords, "Ob|O", names, &user, &run->kind, &waiter))
		return -1;
	Py_INCREF(user);
	run->user = user;
	Py_XINCREF(waiter);
	run->waiter = waiter;
	return 0;
}

struct run *fast_new_run(PyObject *user, uint8_t kind)
{
	static allocfunc alloc;

	if (!alloc)
		alloc = (allocfunc)PyType_GetSlot(fast_run_type, Py_tp_alloc);
	struct run *run = (struct run *)alloc(fast_run_type, 0);

	if (run) {
		Py_XINCREF(user);
		run->user = user;
		run->kind = kind;
	}
	return run;
}

static Py_ssize_t run_length(PyObject *self)
{
	return ((struct run *)self)->count;
}

static int run_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct run *run = (struct run *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(run->user);
	Py_VISIT(run->waiter);
	for (uint32_t i = 0; i < run->count; i++)
		Py_VISIT(run->pins[i]);
	return 0;
}

static int run_clear(PyObject *self)
{
	Py_CLEAR(((struct run *)self)->user);
	Py_CLEAR(((struct run *)self)->waiter);
	return 0;
}

/* A run that was never posted, or that has lost its queue pair, lets go here at the latest. */
static void run_dealloc(PyObject *self)
{
	struct run *run = (struct run *)self;
	PyObject *type, *value, *traceback;

	PyObject_GC_UnTrack(self);
	PyErr_Fetch(&type, &value, &traceback);
	let_go(run);
	PyErr_Restore(type, value, traceback);
	run_clear(self);
	free_arrays(run);
	fast_free(self);
}

static PyMemberDef run_members[] = {
	{"waiter", T_OBJECT, offsetof(struct run, waiter), 0, NULL},
	{"kind", T_UBYTE, offsetof(struct run, kind), READONLY, NULL},
	{"partial", T_BOOL, offsetof(struct run, partial), 0, NULL},
	{"entries", T_UINT, offsetof(struct run, count), READONLY, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyGetSetDef run_getset[] = {
	{"lengths", run_lengths, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef run_methods[] = {
	{"write", (PyCFunction)(void (*)(void))run_write, METH_FASTCALL, NULL},
	{"read", (PyCFunction)(void (*)(void))run_read, METH_FASTCALL, NULL},
	{"put", run_put, METH_VARARGS, NULL},
	{"part", run_part, METH_VARARGS, NULL},
	{"failed", run_failed, METH_O, NULL},
	{"release", run_release, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot run_slots[] = {
	{Py_tp_doc, "One-sided requests that are posted together."},
	{Py_tp_init, run_init},
	{Py_tp_members, run_members},
	{Py_tp_getset, run_getset},
	{Py_tp_methods, run_methods},
	{Py_sq_length, run_length},
	{Py_tp_traverse, run_traverse},
	{Py_tp_clear, run_clear},
	{Py_tp_dealloc, run_dealloc},
	{0, NULL},
};

static PyType_Spec run_spec = {
	.name = "aiordma._native._fast.Run",
	.basicsize = sizeof(struct run),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = run_slots,
};

int fast_add_run(PyObject *module)
{
	fast_run_type = fast_add_type(module, &run_spec);
	return fast_run_type ? 0 : -1;
}
