/* The trace: every work request, every completion, every change of a queue pair's state and every
 * asynchronous event of this process, as lines of JSON (docs/trace.md has their meaning).
 *
 * While there is none, each of these places costs a branch that is never taken.  Everything here is
 * under the engine's lock, which is also what gives the lines their order.
 */
#pragma once

#include <limits.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "engine/engine.h"

struct soft_cq;
struct soft_qp;
struct soft_range;
struct soft_refusal_note;
struct soft_refused;
struct soft_srq;

struct soft_trace {
	bool on;
	uint32_t requests; /* numbers given so far; 0 is none */
	const char *why; /* of the next completion, with that lkey, or NULL */
	uint32_t lkey;
	uint64_t drops_until; /* the time up to which lines about drops have used up their share */
	uint32_t drops_omitted; /* since the latest such line */
	pid_t asked; /* the process that has read its environment */
	struct soft_trace_file {
		char path[PATH_MAX];
		int fd; /* -1: none */
		pid_t pid;
		off_t end; /* of the lines */
		rlim_t limit;
		char refusal[900]; /* why the latest one was not opened; empty if errno says it */
	} file;
};

#define soft_trace_on (soft_device.trace->on)

#define SOFT_TRACE(what, ...)                                                                      \
	do {                                                                                       \
		if (__builtin_expect(soft_trace_on, false))                                        \
			soft_trace_##what(__VA_ARGS__);                                            \
	} while (0)

/* ---- trace.c: what happened; by way of SOFT_TRACE ------------------------------------------- */

/* Work requests that have been put into the queue from index `from` on.  Each gets a number, which
 * its completion tells again. */
void soft_trace_sends(struct soft_qp *qp, uint32_t from);
void soft_trace_receives(struct soft_qp *qp, uint32_t from);
void soft_trace_shared_receives(struct soft_srq *srq, uint32_t from);
/* One that was refused, for a queue by the name and number of its owner; `opcode` -1: a receive. */
void soft_trace_refused(const char *owner, uint32_t number, int opcode, uint64_t wr_id,
			const struct soft_refused *why);
/* Another call that was refused (refusal.c). */
void soft_trace_call_refused(const char *call, const char *owner, uint32_t number, int error,
			     const struct soft_refusal_note *note);
/* ibv_modify_qp(3) was refused; `to`: the state that was asked for. */
void soft_trace_modify_refused(const struct soft_qp *qp, enum ibv_qp_state to, int error,
			       const struct soft_refusal_note *note);

/* Of the request with that number, or 0 when it was posted before the trace began; `lost`: the
 * completion queue had no room for it. */
void soft_trace_completion(const struct soft_cq *cq, const struct ibv_wc *wc, uint32_t request,
			   bool lost);

void soft_trace_created(const struct soft_qp *qp);
void soft_trace_destroyed(const struct soft_qp *qp);
void soft_trace_state(const struct soft_qp *qp, enum ibv_qp_state to);
void soft_trace_event(const struct ibv_async_event *event);
/* Requests of a queue pair are transmitted again, or the receiver was not ready for them. */
void soft_trace_retry(const struct soft_qp *qp, const char *cause);
/* Why the device may not reach the memory of the next request that completes, and its key. */
void soft_trace_why(const char *reason, uint32_t lkey);
void soft_trace_registered(const struct soft_range *range);
/* A region was deregistered, or a window is no longer bound. */
void soft_trace_key_ended(uint32_t key);
/* A request of the peer, for which no memory is to blame. */
void soft_trace_request_refused(const struct soft_qp *qp, const char *reason);
/* The peer of a queue pair may not reach memory: why (soft_remote_objection), and what
 * it asked for; without rights, the key of a window that it wants to end. */
void soft_trace_no_access(const struct soft_qp *qp, const char *reason, uint32_t rkey,
			  uint64_t address, uint64_t length, unsigned rights);
/* Something from a peer is dropped, and the peer gets no answer that tells it why.  Any host can send
 * such packets, so that a second has a limited number of these lines. */
struct soft_drop {
	const char *reason;
	uint32_t qp_num; /* of the queue pair that it is for; 0 if that is not known */
	uint32_t remote_qpn; /* of the peer's queue pair; 0 if that is not known */
	const union ibv_gid *remote; /* the address that it came from, or NULL */
	bool has_psn;
	uint32_t psn, expected_psn;
};
void soft_trace_dropped(const struct soft_drop *drop);
#define SOFT_TRACE_DROPPED(...) SOFT_TRACE(dropped, &(const struct soft_drop){__VA_ARGS__})
/* One that was asked for (inject.h); of a queue pair or a completion queue unless 0. */
void soft_trace_fault(const char *fault, uint32_t qp_num, uint32_t cq);

extern const struct soft_subsystem soft_trace_subsystem;

/* ---- refusal.c: why calls other than those that post are refused ----------------------------- */

/* The code that finds the mistake returns soft_refuse(), which notes the reason for this thread.  The
 * call ends with soft_call_result() or soft_call_made(), which writes the line of the trace and
 * forgets the note.  A note is used only with the errno value that it was made for, so a failure
 * without a note is traced with its errno value alone. */

struct soft_refusal_note {
	const char *reason; /* as in aiordma/_core/trace_records.py; NULL if nothing was noted */
	int error;
	const char *field; /* the argument that is wrong, or NULL */
	uint64_t value; /* of that argument */
	uint64_t limit; /* the largest value that the device allows; 0 if that is not the mistake */
	uint32_t attributes; /* enum ibv_qp_attr_mask */
};

/* Note why the call under way is refused.  Returns `error`. */
int soft_refuse(int error, const char *reason);
/* The same for an argument with this value.  Returns EINVAL. */
int soft_refuse_value(const char *reason, const char *field, uint64_t value);
/* The same for attributes of ibv_modify_qp(3).  Returns EINVAL. */
int soft_refuse_attributes(const char *reason, uint32_t attributes);

/* An argument and the largest value that the device allows. */
struct soft_limit {
	const char *field;
	uint64_t value, most;
};

/* Note the first argument that is too large.  Returns 0 or EINVAL. */
int soft_check_limits(const struct soft_limit *limits, size_t count);

/* Returns the thread's note if it was made for `error`, else one without a reason, and forgets it. */
struct soft_refusal_note soft_refusal_take(int error);

/* End `call` with `error`, or 0.  The object that it was made on has that name and number in the trace;
 * NULL if it has none.  Not under the lock.  Keeps errno.  Returns `error`. */
int soft_call_result(const char *call, const char *owner, uint32_t number, int error);
/* End a call that returns a pointer, which is NULL with errno set if it failed.  Returns `object`. */
void *soft_call_made(const char *call, const char *owner, uint32_t number, void *object);

/* ---- trace_file.c: lines into a file --------------------------------------------------------- */

/* Open `path`, with %p for the number of this process.  Returns 0 or an errno value: also for a file
 * that another user could read or has chosen.  Then soft_trace_file_refusal may say more. */
int soft_trace_file_open(const char *path);
const char *soft_trace_file_refusal(void);
/* Add a line, which has its newline.  0 or an errno value: then the file is to be closed. */
int soft_trace_file_add(const char *line, size_t length);
/* The same for the last line, in the place of others where there is no room for it. */
void soft_trace_file_close(const char *line, size_t length);
/* Without a last line. */
void soft_trace_file_forget(void);
/* The one that is open, as it is called; or NULL. */
const char *soft_trace_file_path(void);
