/* Manages the engine's life cycle. Adding the first user starts the engine, and removing the last
 * user stops it. This file also contains the fork handlers. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "engine_internal.h"

/* Open the file that detects whether the program closes all descriptors (soft_engine.sentinel).
 * Returns 0 or an errno value. */
static int open_sentinel(void)
{
	struct stat status;

	soft_device.engine->sentinel.fd = soft_open_identity("embedded0");
	if (soft_device.engine->sentinel.fd < 0 || fstat(soft_device.engine->sentinel.fd, &status))
		return errno;
	soft_device.engine->sentinel.device = status.st_dev;
	soft_device.engine->sentinel.inode = status.st_ino;
	return 0;
}

/* Returns whether the program has closed the sentinel, even if another file has reused its
 * number. */
static bool is_sentinel_lost(void)
{
	struct stat status;

	return soft_device.engine->sentinel.fd >= 0 &&
	       (fstat(soft_device.engine->sentinel.fd, &status) ||
		status.st_dev != soft_device.engine->sentinel.device ||
		status.st_ino != soft_device.engine->sentinel.inode);
}

static void alarm_ready(struct soft_fd_watch *watch)
{
	uint64_t expirations;

	if (read(watch->fd, &expirations, sizeof(expirations)) == sizeof(expirations))
		soft_timers_run();
}

/* Poll the rings, because soft_engine_schedule_step() has been called. */
static void step_event_ready(struct soft_fd_watch *watch)
{
	uint64_t count;

	if (read(watch->fd, &count, sizeof(count)) == sizeof(count))
		soft_device.engine->poller->poll();
}

void soft_engine_schedule_step(void)
{
	soft_assert_locked();
	const uint64_t one = 1;

	/* If the write fails, the counter is full, which makes the eventfd readable as well. */
	(void)!write(soft_device.engine->step_event.fd, &one, sizeof(one));
}

void soft_engine_alarm(uint64_t deadline_ns)
{
	struct itimerspec when = {
		.it_value = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
			     .tv_nsec = (long)(deadline_ns % 1000000000u)},
	};

	timerfd_settime(soft_device.engine->alarm.fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void close_all(void)
{
	soft_watch_close(&soft_device.engine->step_event);
	soft_watch_close(&soft_device.engine->alarm);
	soft_close_fd(&soft_device.engine->wake_fd);
	soft_close_fd(&soft_device.engine->epoll_fd);
	soft_close_fd(&soft_device.engine->sentinel.fd);
	free(soft_device.engine->scratch);
	soft_device.engine->scratch = NULL;
}

static void for_each_outer_mutex(int (*change)(pthread_mutex_t *mutex))
{
	EACH_SUBSYSTEM (it)
		if ((*it)->outer)
			change((*it)->outer());
}

static void for_each_leaf_mutex(int (*change)(pthread_mutex_t *mutex))
{
	EACH_SUBSYSTEM (it)
		if ((*it)->leaf)
			change((*it)->leaf());
}

/* Acquire the mutexes that the engine's thread never takes. */
static void lock_outer_mutexes(void)
{
	for_each_outer_mutex(pthread_mutex_lock);
	pthread_mutex_lock(&soft_device.engine->users_mutex);
}

static void lock_engine_and_leaves(void)
{
	pthread_mutex_lock(&soft_device.engine->lock);
	soft_note_locked(true);
	for_each_leaf_mutex(pthread_mutex_lock);
}

static void before_fork(void)
{
	lock_outer_mutexes();
	lock_engine_and_leaves();
}

/* Release all mutexes that are held across a fork. */
static void unlock_all(void)
{
	for_each_leaf_mutex(pthread_mutex_unlock);
	soft_note_locked(false);
	pthread_mutex_unlock(&soft_device.engine->lock);
	pthread_mutex_unlock(&soft_device.engine->users_mutex);
	for_each_outer_mutex(pthread_mutex_unlock);
}

/* Forget the device and close its descriptors, after a fork or after the program has closed them. A
 * forked child does not own its parent's device. It must not serve the parent's peers or keep their
 * streams open after the parent exits, but it may open its own device. Inherited objects must not
 * be used any more (ibv_fork_init(3)). */
static void forget_device(void)
{
	soft_list_drain (struct soft_fd_watch, watch, &soft_device.engine->watches, node) {
		soft_list_remove(&watch->node);
		watch->watched = false;
		watch->interest = 0;
		soft_close_fd(&watch->fd);
	}
	close_all();
	soft_timers_stop_all();
	soft_list_init(&soft_device.engine->deferred);
	soft_list_clear(&soft_device.engine->channels); /* destroying a channel later is harmless */
	EACH_SUBSYSTEM (it)
		if ((*it)->forked)
			(*it)->forked();
	soft_device.engine->running = soft_device.engine->thread_ticks =
		soft_device.engine->thread_sleeps = false;
	soft_device.engine->down_ports = 0;
	soft_device.engine->event_count = 0;
	soft_device.engine->fork_generation++;
	soft_device.engine->armed_cqs = 0;
	soft_device.engine->announced_polls = 0;
	soft_device.engine->users = 0;
}

/* Forget the parent's device in a forked child, and release the locks that were held across the
 * fork. */
static void after_fork_in_child(void)
{
	if (soft_device.engine->has_started) {
		/* The parent's threads do not exist in the child. */
		soft_device.engine->notifying_threads = 0;
		soft_device.engine->lock_waiters = 0;
		soft_device.engine->spinning_threads = 0;
		forget_device();
	}
	unlock_all();
}

static void forget_lost_device(void)
{
	fprintf(stderr,
		"aiordma: this process has closed the embedded device's file descriptors; it can "
		"only destroy the device's objects now\n");
	soft_device.engine->descriptors_lost = true;
	soft_device.engine->descriptor_losses++;
	forget_device();
	soft_device.engine->descriptors_lost = false;
}

bool soft_engine_lost_descriptors(void)
{
	soft_assert_locked();
	return is_sentinel_lost();
}

static bool are_descriptors_lost(void)
{
	soft_lock();
	bool lost = is_sentinel_lost();

	soft_unlock();
	return lost;
}

void soft_engine_handle_lost_descriptors(void)
{
	if (!are_descriptors_lost())
		return;
	lock_outer_mutexes();
	/* Check again, because another thread may have forgotten the device in the meantime. */
	bool lost = are_descriptors_lost();

	/* The thread may be asleep in poll(2) on closed descriptors, so cancel it. */
	if (lost && soft_device.platform->threads) {
		soft_publish(&soft_device.engine->stopping, true);
		pthread_cancel(soft_device.engine->thread);
		pthread_join(soft_device.engine->thread, NULL);
	}
	lock_engine_and_leaves();
	if (lost)
		forget_lost_device();
	unlock_all();
}

/* Register the fork handlers once. This happens when the subsystems are set, because their mutexes
 * are in use before the engine starts. Returns 0 or an errno value. */
int soft_engine_guard_fork(void)
{
	static bool guarded;
	int rc = guarded ? 0 : pthread_atfork(before_fork, unlock_all, after_fork_in_child);

	guarded = !rc;
	return rc;
}

unsigned soft_engine_fork_generation(void)
{
	return soft_device.engine->fork_generation;
}

/* Start the engine's thread with all signals blocked except those that report the thread's own
 * faults. A fault whose signal is blocked would kill the process without running its handler
 * (pthread_sigmask(3)). Returns 0 or an errno value. */
static int start_thread(void)
{
	sigset_t blocked, previous;

	sigfillset(&blocked);
	sigdelset(&blocked, SIGSEGV);
	sigdelset(&blocked, SIGBUS);
	sigdelset(&blocked, SIGFPE);
	sigdelset(&blocked, SIGILL);
	pthread_sigmask(SIG_SETMASK, &blocked, &previous);
	errno = pthread_create(&soft_device.engine->thread, NULL, soft_engine_run, NULL);
	int rc = errno ? soft_check_call("clone or clone3", -1) : 0; /* reads errno */

	pthread_sigmask(SIG_SETMASK, &previous, NULL);
	return rc;
}

static _Thread_local char start_failure[1024]; /* why this thread's latest start failed */

int soft_misconfigured(int error, const char *variable, const char *value, const char *expected,
		       ...)
{
	int length =
		snprintf(start_failure, sizeof(start_failure), "%s is '%.700s': ", variable, value);
	va_list values;

	va_start(values, expected);
	vsnprintf(start_failure + length, sizeof(start_failure) - (size_t)length, expected, values);
	va_end(values);
	/* EINVAL says nothing that the message does not say. */
	fprintf(stderr, "aiordma: %s%s%s\n", start_failure, error == EINVAL ? "" : ": ",
		error == EINVAL ? "" : strerror(error));
	return error;
}

/* Returns whether the call failed for lack of descriptors or memory. Any other error means that the
 * kernel denies the call. */
static bool is_shortage(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
	       error == EAGAIN;
}

int soft_check_call(const char *name, long result)
{
	const int error = errno;

	if (result >= 0 || error == EBADF)
		return 0;
	if (is_shortage(error))
		return error;
	snprintf(start_failure, sizeof(start_failure),
		 "the kernel denies this process the system call %s, which the embedded device "
		 "needs; allow it in the seccomp filter of the container or service",
		 name);
	fprintf(stderr, "aiordma: %s: %s\n", start_failure, strerror(error));
	return error;
}

const char *soft_start_failure(void)
{
	return start_failure;
}

static int make_eventfd(int *fd)
{
	*fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return soft_check_call("eventfd2", *fd);
}

/* Open the engine's descriptors. Returns 0 or an errno value. */
static int make_descriptors(void)
{
	struct soft_engine *engine = soft_device.engine;
	int rc;

	engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	rc = soft_check_call("epoll_create1", engine->epoll_fd);
	if (!rc)
		rc = make_eventfd(&engine->wake_fd);
	if (!rc)
		rc = make_eventfd(&engine->step_event.fd);
	if (rc)
		return rc;
	engine->alarm.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	return soft_check_call("timerfd_create", engine->alarm.fd);
}

/* Start the engine for its first user. Returns 0 or an errno value. */
static int start(void)
{
	int rc = soft_engine_guard_fork();

	if (!rc)
		soft_device.engine->has_started = true;
	if (!rc)
		rc = soft_check_calls();
	EACH_SUBSYSTEM (it)
		if (!rc && (*it)->start)
			rc = (*it)->start();
	if (rc)
		return rc;
	soft_timers_stop_all();
	soft_device.engine->epoll_fd = soft_device.engine->wake_fd = -1;
	soft_device.engine->step_event =
		(struct soft_fd_watch){.fd = -1, .ready = step_event_ready};
	soft_device.engine->alarm = (struct soft_fd_watch){.fd = -1, .ready = alarm_ready};
	soft_device.engine->scratch = malloc(sizeof(*soft_device.engine->scratch));
	if (!soft_device.engine->scratch)
		return ENOMEM;
	rc = make_descriptors();
	if (!rc)
		rc = open_sentinel();
	if (!rc)
		rc = soft_watch(&soft_device.engine->step_event, EPOLLIN);
	if (!rc)
		rc = soft_watch(&soft_device.engine->alarm, EPOLLIN);
	if (!rc) {
		soft_publish(&soft_device.engine->stopping, false);
		soft_device.engine->running = true;
		rc = soft_device.platform->threads ? start_thread() : 0;
	}
	if (rc) {
		soft_device.engine->running = false;
		close_all();
	}
	return rc;
}

int soft_engine_get(void)
{
	int rc = 0;

	start_failure[0] = '\0';
	pthread_mutex_lock(&soft_device.engine->users_mutex);
	if (soft_device.engine->users == 0) {
		soft_lock();
		rc = start();
		soft_unlock();
	}
	if (!rc)
		soft_device.engine->users++;
	pthread_mutex_unlock(&soft_device.engine->users_mutex);
	return rc;
}

bool soft_engine_is_used(void)
{
	pthread_mutex_lock(&soft_device.engine->users_mutex);
	bool used = soft_device.engine->users;

	pthread_mutex_unlock(&soft_device.engine->users_mutex);
	return used;
}

void soft_engine_put(void)
{
	const uint64_t one = 1;

	pthread_mutex_lock(&soft_device.engine->users_mutex);
	/* `users` is 0 in the child of a fork, where inherited objects may still be destroyed. */
	if (soft_device.engine->users && --soft_device.engine->users == 0) {
		soft_publish(&soft_device.engine->stopping, true);
		if (write(soft_device.engine->wake_fd, &one, sizeof(one)) != sizeof(one))
			abort(); /* cannot fail: the eventfd is valid, and its counter is 0 */
		if (soft_device.platform->threads)
			pthread_join(soft_device.engine->thread, NULL);
		soft_lock();
		EACH_SUBSYSTEM (it)
			if ((*it)->stop)
				(*it)->stop();
		soft_timers_stop_all();
		soft_device.engine->running = false;
		soft_device.engine->down_ports = 0;
		close_all();
		soft_unlock();
	}
	pthread_mutex_unlock(&soft_device.engine->users_mutex);
}
