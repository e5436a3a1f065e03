/* A thread that finds the engine's lock taken: what the system sees of it.
 *
 * The linker puts the functions below in place of the C library's (meson.build). */
#include "engine/engine_internal.h"
#include "verbs_side.h"

int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_trylock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex);

static unsigned taken; /* so many tries more find it taken */
static unsigned tries, sleeps, waiting;

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex)
{
	sleeps += mutex == &engine.lock;
	return __real_pthread_mutex_lock(mutex);
}

int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex)
{
	if (mutex != &engine.lock)
		return __real_pthread_mutex_trylock(mutex);
	if (tries++)
		waiting += soft_counter_get(&engine.waiting);
	if (!taken)
		return __real_pthread_mutex_trylock(mutex);
	taken--;
	return EBUSY;
}

static void take(unsigned busy)
{
	taken = busy;
	tries = sleeps = waiting = 0;
	soft_lock();
	soft_unlock();
	taken = 0;
	CHECK_EQUAL(soft_counter_get(&engine.waiting), 0);
}

int main(void)
{
	enum {
		MOMENT = 100, /* nearly all the waits of an application that polls memory */
		FOREVER = 1000000
	};

	take(0);
	CHECK_EQUAL(tries, 1);
	CHECK_EQUAL(sleeps, 0);
	/* Free again after a moment: it has not slept, and others saw that it waited. */
	take(MOMENT);
	CHECK_EQUAL(tries, MOMENT + 1);
	CHECK_EQUAL(waiting, MOMENT);
	CHECK_EQUAL(sleeps, 0);
	/* Else it sleeps. */
	take(FOREVER);
	CHECK(tries < FOREVER / 1000);
	CHECK_EQUAL(sleeps, 1);
	return 0;
}
