/* A task looks once before it waits.
 *
 * It need not go round the loop for what is all but here: it looks for completions itself
 * (`Driver._look_once`), if hardly anybody else is waiting for the device.  What else it finds then is
 * called back by the loop, or by the drain that it is part of.
 */
#include "promise.h"

/* Looks in a row that are not made because the last ones found nothing. */
enum { MOST_SKIPPED = 255 };

/* A look costs less than going round the loop.  It must not keep the tasks of others waiting: nearly
 * nobody else waits for the device, and after so many looks the loop has its turn. */
static bool may_look(struct table *table)
{
	if (!table->look || table->look == Py_None || table->draining || !table->looks ||
	    table->waiting > 1)
		return false;
	if (table->skip) {
		table->skip--;
		return false;
	}
	return true;
}

int fast_look(struct promise *promise)
{
	struct table *table = (struct table *)promise->table;
	PyObject *call = table->look;

	if (!may_look(table))
		return 0;
	table->looks--;
	Py_INCREF(call); /* the table may be told to look no more */
	PyObject *done = PyObject_CallNoArgs(call);

	Py_DECREF(call);
	if (!done)
		return -1;
	Py_DECREF(done);
	if (promise->state != PROMISE_PENDING)
		table->misses = 0;
	else
		table->misses = table->misses < MOST_SKIPPED / 2 ? 2 * table->misses + 1 :
								   MOST_SKIPPED;
	table->skip = table->misses;
	return 0;
}
