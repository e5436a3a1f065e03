/* Failures of the kernel and the C library on demand. After shortage_begin(n), the n-th call by
 * this thread to any of the functions below fails. Programs that include this header are linked
 * with --wrap for each function (meson.build), so the device needs no changes. */
#pragma once

#include <errno.h>
#include <ifaddrs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

static __thread unsigned shortage_in; /* calls until the failure; 0 for none */
static __thread int shortage_error;   /* errno value of the failure; 0 if none yet */

/* Make the n-th call from now on fail. */
static inline void shortage_begin(unsigned nth)
{
	shortage_in = nth;
	shortage_error = 0;
}

/* Cancel the failure. Returns the errno value of the failed call, or 0 if no call has failed. */
static inline int shortage_end(void)
{
	shortage_in = 0;
	return shortage_error;
}

static inline bool refused_now(int error)
{
	if (!shortage_in || --shortage_in)
		return false;
	shortage_error = errno = error;
	return true;
}

#define REFUSABLE(result, name, parameters, arguments, error, failure)                             \
	result __real_##name parameters;                                                           \
	result __wrap_##name parameters;                                                           \
	result __wrap_##name parameters                                                            \
	{                                                                                          \
		return refused_now(error) ? (failure) : __real_##name arguments;                   \
	}

REFUSABLE(void *, malloc, (size_t size), (size), ENOMEM, NULL)
REFUSABLE(void *, calloc, (size_t count, size_t size), (count, size), ENOMEM, NULL)
REFUSABLE(void *, realloc, (void *old, size_t size), (old, size), ENOMEM, NULL)
REFUSABLE(int, posix_memalign, (void **memory, size_t alignment, size_t size),
	  (memory, alignment, size), ENOMEM, ENOMEM)
REFUSABLE(void *, mmap, (void *at, size_t length, int prot, int flags, int fd, off_t offset),
	  (at, length, prot, flags, fd, offset), ENOMEM, MAP_FAILED)
REFUSABLE(ssize_t, getrandom, (void *to, size_t length, unsigned flags), (to, length, flags),
	  ENOSYS, -1)
REFUSABLE(int, epoll_create1, (int flags), (flags), EMFILE, -1)
REFUSABLE(int, epoll_ctl, (int at, int operation, int fd, struct epoll_event *event),
	  (at, operation, fd, event), ENOSPC, -1)
REFUSABLE(int, eventfd, (unsigned count, int flags), (count, flags), EMFILE, -1)
REFUSABLE(int, timerfd_create, (clockid_t clock, int flags), (clock, flags), EMFILE, -1)
REFUSABLE(int, socket, (int domain, int type, int protocol), (domain, type, protocol), EMFILE, -1)
REFUSABLE(int, socketpair, (int domain, int type, int protocol, int *fds),
	  (domain, type, protocol, fds), EMFILE, -1)
REFUSABLE(int, bind, (int fd, const struct sockaddr *address, socklen_t length),
	  (fd, address, length), EADDRINUSE, -1)
REFUSABLE(int, listen, (int fd, int backlog), (fd, backlog), EADDRINUSE, -1)
REFUSABLE(int, getsockname, (int fd, struct sockaddr *address, socklen_t *length),
	  (fd, address, length), ENOBUFS, -1)
REFUSABLE(int, getifaddrs, (struct ifaddrs * *list), (list), ENOMEM, -1)
REFUSABLE(int, pthread_create,
	  (pthread_t * thread, const pthread_attr_t *attr, void *(*run)(void *), void *with),
	  (thread, attr, run, with), EAGAIN, EAGAIN)
