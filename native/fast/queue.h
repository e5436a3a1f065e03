/* Work under way: the slots of an event loop, the queues of a queue pair, and their completions. */
#ifndef AIORDMA_FAST_QUEUE_H
#define AIORDMA_FAST_QUEUE_H

#include "block.h"

#define NO_SLOT UINT32_MAX

/* Looks of tasks that are about to wait, before the loop has its turn and with it all others. */
enum {
	FAST_LOOKS = 16
};

/* The kinds that differ here; the others are aiordma/_core/operations.py's alone. */
enum {
	KIND_RECV = 0,
	KIND_SEND = 1,
	KIND_WRITE = 2,
	KIND_READ = 3,
};

struct slot_list {
	uint32_t first, last;
};

/* The send and the receive queue of one queue pair. */
struct queue {
	PyObject_HEAD
	PyObject *table;
	PyObject *user; /* what remote memory must be for */
	PyObject *traffic; /* takes the messages */
	unsigned long long qp; /* struct ibv_qp *; 0: it is gone */
	unsigned long long extended;
	unsigned int capacity; /* of the send queue */
	unsigned int free; /* entries of it */
	unsigned int reserved; /* of these, not for transfers */
	unsigned long long completions; /* good ones */
	struct slot_list sends, receives;
	char accepting; /* transfers, without asking Python */
	char backlogged; /* others have to be posted first */
	char watched; /* Python is told of each room that comes, whatever the traffic makes of it */
	char failed; /* nothing that completes is done any more: it is only over */
	char touched; /* by the drain that is going on: has room that is not used yet */
};

struct slot {
	uint32_t generation;
	uint32_t next, previous; /* of the queue's list, or the next free one */
	uint32_t entries;
	struct queue *queue; /* NULL: free */
	PyObject *work;
	uint8_t kind;
};

struct table {
	PyObject_HEAD
	struct slot *slots;
	uint32_t count, free, taken;
	PyObject *loop; /* the event loop */
	PyObject **woken; /* promises that this drain has settled */
	uint32_t woken_count, woken_room;
	char closed; /* the channel is closed, or this is a child of a fork */
	char draining;
	char waking; /* they are being called back, by this thread of the loop */
	unsigned long thread;
	char later; /* they are called back by the loop: this drain is in the middle of something */
	char returns; /* the caller of this drain polls again soon */
	char looking; /* and so does the loop, before it sleeps */
	PyObject *look; /* called by a task before it waits; NULL: no polling */
	PyObject *keep; /* to be called by the loop, as often as it finds something */
	PyObject *ended; /* wake.c: a future, or NULL */
	uint32_t waiting; /* promises under way that have callbacks */
	uint16_t looks; /* that may still be made before the loop has its turn */
	uint16_t misses,
		glances; /* grows with looks that found nothing; those that are short for it */
	unsigned int look_us; /* of one that is not */
	unsigned int keep_us; /* of one of the loop's */
	char found; /* by the loop's, since Python has asked */
	unsigned long long stray; /* completions that matched no work */
};

/* The references of a slot that is free now. */
struct held {
	struct queue *queue;
	PyObject *work;
};

extern PyTypeObject *fast_table_type;
extern PyTypeObject *fast_queue_type;

/* Whether this is a task that a drain has called back: then it is in the right loop, which
 * asyncio would find out with a system call (before Python 3.12). */
bool fast_is_here(const struct table *table);

/* An index, or -1 with MemoryError. */
int64_t fast_take_slot(struct table *table, struct queue *queue, uint8_t kind, PyObject *work,
		       uint32_t entries);
uint64_t fast_wr_id(const struct table *table, uint32_t index);
struct slot *fast_find_slot(struct table *table, uint64_t wr_id);
struct held fast_free_slot(struct table *table, struct slot *slot);
void fast_drop(struct held held);

/* Posts a frame, for which there must be room; what is wrong with it is told to Python, and by it to
 * the frame.  -1 with an exception. */
int fast_post_frame(struct queue *queue, PyObject *frame);

/* A receive in a block whose lease it takes over; what is wrong with it is told to Python.  -1 with an
 * exception. */
int fast_post_receive(struct queue *queue, struct block *block, uint32_t length);

/* Receives in blocks that are ready, while no task waits for memory: how many.  What fails is not among them, and
 * comes again with Python. */
unsigned int fast_post_ready(struct queue *queue, struct shelf *shelf, unsigned int most,
			     uint32_t length);

PyObject *fast_drain(PyObject *table, PyObject *const *args, Py_ssize_t count);
PyObject *fast_serve(PyObject *table, PyObject *const *args, Py_ssize_t count);
PyObject *fast_look_again(PyObject *table, PyObject *const *args, Py_ssize_t count);
PyObject *fast_keep_looking(PyObject *table, PyObject *const *args, Py_ssize_t count);
PyObject *fast_look_soon(PyObject *table, PyObject *unused);

int fast_add_table(PyObject *module);
int fast_add_queue(PyObject *module);
int fast_add_drain(PyObject *module);

#endif
