/* A task polls once before it waits.
 *
 * A completion that is about to come need not wait for the next iteration of the loop: the task polls
 * itself (`Table.look_again`) if hardly any other task waits for the device.  Callbacks of other promises
 * that this settles are called by the loop, or by the enclosing drain.
 */
#include "promise.h"

/* Looks in a row that are mere glances because the last ones found nothing. */
enum {
	MOST_GLANCES = 255
};

/* A look costs less than going round the loop.  It must not keep other tasks waiting: hardly any
 * other one waits for the device, and after so many looks the loop has its turn. */
static bool may_look(const struct table *table)
{
	return table->look && table->look != Py_None && !table->draining && table->looks &&
	       table->waiting <= 1;
}

/* For so many microseconds.  -1 with an exception. */
static int look_for(struct table *table, unsigned int spin_us)
{
	PyObject *call = table->look;
	PyObject *spin = PyLong_FromUnsignedLong(spin_us);

	if (!spin)
		return -1;
	Py_INCREF(call); /* the table may be told to look no more */
	PyObject *done = PyObject_CallFunctionObjArgs(call, spin, NULL);

	Py_DECREF(call);
	Py_DECREF(spin);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

int fast_look(struct promise *promise)
{
	struct table *table = (struct table *)promise->table;

	if (!may_look(table))
		return 0;
	table->looks--;
	if (table->glances) { /* what is here already is found by these too */
		table->glances--;
		return look_for(table, 0);
	}
	if (look_for(table, table->look_us))
		return -1;
	if (promise->state != PROMISE_PENDING)
		table->misses = 0;
	else
		table->misses =
			table->misses < MOST_GLANCES / 2 ? 2 * table->misses + 1 : MOST_GLANCES;
	table->glances = table->misses;
	return 0;
}
