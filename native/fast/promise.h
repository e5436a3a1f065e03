/* What one task waits for: a future that a drain keeps; see promise.c. */
#ifndef AIORDMA_FAST_PROMISE_H
#define AIORDMA_FAST_PROMISE_H

#include "queue.h"

enum {
	PROMISE_PENDING,
	PROMISE_DONE,
	PROMISE_FAILED,
	PROMISE_CANCELLED,
};

struct promise {
	PyObject_HEAD
	PyObject *table;    /* of the event loop */
	PyObject *what;     /* it failed with, or was cancelled with */
	PyObject *callback; /* the first one, nearly always the only one */
	PyObject *context;  /* to call it in */
	PyObject *more;     /* a list of others, with theirs */
	PyObject *target;   /* what its owner brought */
	char state;
	char blocking; /* as a task wants it of what it is to wait for */
	char sends;    /* its target hears of a cancellation */
};

extern PyTypeObject *fast_promise_type;

/* A new reference, or NULL. */
struct promise *fast_new_promise(PyObject *table);

/* Nothing if it is over already.  -1 with an exception. */
int fast_settle(struct promise *promise, char state, PyObject *what);

/* For a waiter of any kind: 1 if it is over, -1 with an exception. */
int fast_is_over(PyObject *waiter);

/* Tells a waiter of any kind that all went well, or why not (NULL: well); nothing if it is over.
 * -1 with an exception. */
int fast_tell(PyObject *waiter, PyObject *error);

/* What was raised in the middle, for its end. */
struct raised {
	PyObject *type, *value, *traceback;
};

/* Calls the callbacks of all promises that the drain has settled.  A drain in the middle of that, of who
 * looks before it waits, leaves them to it. */
void fast_wake(struct table *table, struct raised *raised);

/* wake.c.  The loop of a table, borrowed, or NULL with an exception. */
PyObject *fast_loop_of(PyObject *table);
/* In the loop's next turn.  -1 with an exception. */
int fast_call_soon(struct promise *promise, PyObject *callback, PyObject *context);
int fast_intern_wake(void);

/* look.c.  Looks for completions once, if that may be now.  -1 with an exception. */
int fast_look(struct promise *promise);

int fast_add_promise(PyObject *module);

#endif
