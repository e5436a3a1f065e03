/* Which posted work a completion belongs to, and what must live until then.
 *
 * A failed completion defines only wr_id, status, qp_num and vendor_err (ibv_poll_cq(3)), and one of a
 * queue pair that has been destroyed may still lie in the queue.  So every piece of work has a slot,
 * and its wr_id says which, and which generation of it:
 *
 *   bits 63..32  generation, counted up each time the slot is used again
 *   bit  31      AIORDMA_EARLIER: not the last request of several that share the slot
 *   bits 30..24  kind of operation
 *   bits 23..0   index
 *
 * A completion that comes twice, or of a slot that has been used again since, matches no work and is
 * counted.  A slot holds its work and its queue; slots of one queue stand in two lists, in the order
 * of posting.
 */
#include <string.h>

#include "queue.h"

enum {
	FIRST_SLOTS = 256,
	MOST_SLOTS = 1 << 24,
};

PyTypeObject *fast_table_type;

static int grow(struct table *table)
{
	uint32_t count = table->count ? table->count * 2 : FIRST_SLOTS;

	if (count > MOST_SLOTS) {
		PyErr_SetString(PyExc_MemoryError, "all operation slots are taken");
		return -1;
	}
	struct slot *slots = PyMem_Realloc(table->slots, count * sizeof(*slots));

	if (!slots) {
		PyErr_NoMemory();
		return -1;
	}
	for (uint32_t i = table->count; i < count; i++)
		slots[i] = (struct slot){.generation = 1, .next = i + 1 < count ? i + 1 : NO_SLOT};
	table->free = table->count;
	table->slots = slots;
	table->count = count;
	return 0;
}

static struct slot_list *list_of(const struct slot *slot)
{
	return slot->kind == KIND_RECV ? &slot->queue->receives : &slot->queue->sends;
}

int64_t fast_take_slot(struct table *table, struct queue *queue, uint8_t kind, PyObject *work,
		       uint32_t entries)
{
	if (table->free == NO_SLOT && grow(table))
		return -1;
	uint32_t index = table->free;
	struct slot *slot = &table->slots[index];

	table->free = slot->next;
	table->taken++;
	Py_INCREF((PyObject *)queue);
	Py_INCREF(work);
	slot->queue = queue;
	slot->work = work;
	slot->kind = kind;
	slot->entries = entries;
	struct slot_list *list = list_of(slot);
	slot->next = NO_SLOT;
	slot->previous = list->last;
	if (list->last == NO_SLOT)
		list->first = index;
	else
		table->slots[list->last].next = index;
	list->last = index;
	return index;
}

uint64_t fast_wr_id(const struct table *table, uint32_t index)
{
	const struct slot *slot = &table->slots[index];

	return (uint64_t)slot->generation << 32 | (uint64_t)slot->kind << 24 | index;
}

struct slot *fast_find_slot(struct table *table, uint64_t wr_id)
{
	uint32_t index = wr_id & (MOST_SLOTS - 1);

	if (index >= table->count || !table->slots[index].queue ||
	    fast_wr_id(table, index) != wr_id)
		return NULL;
	return &table->slots[index];
}

struct held fast_free_slot(struct table *table, struct slot *slot)
{
	struct held held = {.queue = slot->queue, .work = slot->work};
	struct slot_list *list = list_of(slot);
	uint32_t index = (uint32_t)(slot - table->slots);

	if (slot->previous == NO_SLOT)
		list->first = slot->next;
	else
		table->slots[slot->previous].next = slot->next;
	if (slot->next == NO_SLOT)
		list->last = slot->previous;
	else
		table->slots[slot->next].previous = slot->previous;
	if (slot->kind != KIND_RECV)
		slot->queue->free += slot->entries;
	slot->queue = NULL;
	slot->work = NULL;
	slot->generation++;
	slot->next = table->free;
	table->free = index;
	table->taken--;
	return held;
}

void fast_drop(struct held held)
{
	Py_DECREF(held.work);
	Py_DECREF((PyObject *)held.queue);
}

/* ---- the type -------------------------------------------------------------------------------- */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
	(void)args;
	(void)keywords;
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct table *table = (struct table *)alloc(type, 0);

	if (table) {
		table->free = NO_SLOT;
		table->looks = FAST_LOOKS;
	}
	return (PyObject *)table;
}

static int table_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct table *table = (struct table *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(table->loop);
	Py_VISIT(table->look);
	Py_VISIT(table->keep);
	Py_VISIT(table->ended);
	for (uint32_t i = 0; i < table->woken_count; i++)
		Py_VISIT(table->woken[i]);
	for (uint32_t i = 0; i < table->count; i++) {
		Py_VISIT(table->slots[i].queue);
		Py_VISIT(table->slots[i].work);
	}
	return 0;
}

static int table_clear(PyObject *self)
{
	struct table *table = (struct table *)self;

	for (uint32_t i = 0; i < table->count; i++)
		if (table->slots[i].queue)
			fast_drop(fast_free_slot(table, &table->slots[i]));
	Py_CLEAR(table->loop);
	Py_CLEAR(table->look);
	Py_CLEAR(table->keep);
	Py_CLEAR(table->ended);
	return 0;
}

static void table_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	table_clear(self);
	PyMem_Free(((struct table *)self)->slots);
	PyMem_Free(((struct table *)self)->woken);
	fast_free(self);
}

static Py_ssize_t table_length(PyObject *self)
{
	return ((struct table *)self)->taken;
}

static PyMemberDef table_members[] = {
	{"loop", T_OBJECT_EX, offsetof(struct table, loop), 0, NULL},
	{"look", T_OBJECT, offsetof(struct table, look), 0, NULL},
	{"look_us", T_UINT, offsetof(struct table, look_us), 0, NULL},
	{"keep", T_OBJECT, offsetof(struct table, keep), 0, NULL},
	{"keep_us", T_UINT, offsetof(struct table, keep_us), 0, NULL},
	{"found", T_BOOL, offsetof(struct table, found), 0, NULL},
	{"waiting", T_UINT, offsetof(struct table, waiting), READONLY, NULL},
	{"later", T_BOOL, offsetof(struct table, later), 0, NULL},
	{"returns", T_BOOL, offsetof(struct table, returns), 0, NULL},
	{"looking", T_BOOL, offsetof(struct table, looking), 0, NULL},
	{"closed", T_BOOL, offsetof(struct table, closed), 0, NULL},
	{"waking", T_BOOL, offsetof(struct table, waking), 0, NULL},
	{"stray", T_ULONGLONG, offsetof(struct table, stray), READONLY, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyMethodDef table_methods[] = {
	{"drain", (PyCFunction)(void (*)(void))fast_drain, METH_FASTCALL, NULL},
	{"serve", (PyCFunction)(void (*)(void))fast_serve, METH_FASTCALL, NULL},
	{"look_again", (PyCFunction)(void (*)(void))fast_look_again, METH_FASTCALL, NULL},
	{"keep_looking", (PyCFunction)(void (*)(void))fast_keep_looking, METH_FASTCALL, NULL},
	{"look_soon", fast_look_soon, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
	{Py_tp_doc, "The slots of one event loop."},
	{Py_tp_new, table_new},
	{Py_tp_members, table_members},
	{Py_tp_methods, table_methods},
	{Py_sq_length, table_length},
	{Py_tp_traverse, table_traverse},
	{Py_tp_clear, table_clear},
	{Py_tp_dealloc, table_dealloc},
	{0, NULL},
};

static PyType_Spec table_spec = {
	.name = "aiordma._native._fast.Table",
	.basicsize = sizeof(struct table),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = table_slots,
};

int fast_add_table(PyObject *module)
{
	fast_table_type = fast_add_type(module, &table_spec);
	return fast_table_type ? 0 : -1;
}
