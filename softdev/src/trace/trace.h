/* The trace of this process as JSON lines: work requests, completions, queue pair states and
 * asynchronous events. docs/trace.md describes the records.
 *
 * While tracing is off, each trace point costs one branch that is not taken. All functions require
 * the engine's lock, which also orders the records.
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
	uint32_t requests; /* last request number assigned; 0 if none */
	const char
		*why; /* why the next completion fails, and the lkey concerned; NULL if unknown */
	uint32_t lkey;
	uint64_t drops_until; /* time until which the rate of these records is used up */
	uint32_t drops_omitted; /* dropped packets without a record since the last one */
	pid_t asked; /* process that has read its environment */
	struct soft_trace_file {
		char path[PATH_MAX];
		int fd; /* -1 if none */
		pid_t pid;
		off_t end; /* offset of the end of the last line */
		rlim_t limit;
		char refusal[900]; /* why the last file was not opened; empty if errno says it */
	} file;
};

#define soft_trace_on (soft_device.trace->on)

#define SOFT_TRACE(what, ...)                                                                      \
	do {                                                                                       \
		if (__builtin_expect(soft_trace_on, false))                                        \
			soft_trace_##what(__VA_ARGS__);                                            \
	} while (0)

/* ---- trace.c: what happened; by way of SOFT_TRACE ------------------------------------------- */

/* Record the work requests that have been queued from index `from` on. Each gets a number that its
 * completion repeats. */
void soft_trace_sends(struct soft_qp *qp, uint32_t from);
void soft_trace_receives(struct soft_qp *qp, uint32_t from);
void soft_trace_shared_receives(struct soft_srq *srq, uint32_t from);
/* Record a refused work request of a queue, identified by its owner's name and number. `opcode` is
 * -1 for a receive. */
void soft_trace_refused(const char *owner, uint32_t number, int opcode, uint64_t wr_id,
			const struct soft_refused *why);
/* Record another refused call (refusal.c). */
void soft_trace_call_refused(const char *call, const char *owner, uint32_t number, int error,
			     const struct soft_refusal_note *note);
/* Record a refused ibv_modify_qp(3) to the state `to`. */
void soft_trace_modify_refused(const struct soft_qp *qp, enum ibv_qp_state to, int error,
			       const struct soft_refusal_note *note);

/* Record a completion of the request with this number, or 0 if it was posted before the trace
 * began. `lost` means that the completion queue was full. */
void soft_trace_completion(const struct soft_cq *cq, const struct ibv_wc *wc, uint32_t request,
			   bool lost);

void soft_trace_created(const struct soft_qp *qp);
void soft_trace_destroyed(const struct soft_qp *qp);
void soft_trace_state(const struct soft_qp *qp, enum ibv_qp_state to);
void soft_trace_event(const struct ibv_async_event *event);
/* Record that a queue pair retransmits requests, or that its receiver was not ready. */
void soft_trace_retry(const struct soft_qp *qp, const char *cause);
/* Note why the device may not access the memory of the next request that completes, and its key. */
void soft_trace_why(const char *reason, uint32_t lkey);
void soft_trace_registered(const struct soft_range *range);
/* Record that a region was deregistered or a window was unbound. */
void soft_trace_key_ended(uint32_t key);
/* Record a refused request of the peer for a reason other than memory access. */
void soft_trace_request_refused(const struct soft_qp *qp, const char *reason);
/* Record that a queue pair's peer may not access memory, with the reason (soft_remote_objection)
 * and the requested access. Without rights, the key belongs to a window that the peer wants to
 * invalidate. */
void soft_trace_no_access(const struct soft_qp *qp, const char *reason, uint32_t rkey,
			  uint64_t address, uint64_t length, unsigned rights);
/* A packet from a peer that is dropped without a response that says why. Any host can send such
 * packets, so the number of these records per second is limited. */
struct soft_drop {
	const char *reason;
	uint32_t qp_num; /* local queue pair; 0 if unknown */
	uint32_t remote_qpn; /* peer's queue pair; 0 if unknown */
	const union ibv_gid *remote; /* source address, or NULL */
	bool has_psn;
	uint32_t psn, expected_psn;
};
void soft_trace_dropped(const struct soft_drop *drop);
#define SOFT_TRACE_DROPPED(...) SOFT_TRACE(dropped, &(const struct soft_drop){__VA_ARGS__})
/* Record an injected fault (inject.h) of a queue pair or a completion queue; 0 if it concerns
 * neither. */
void soft_trace_fault(const char *fault, uint32_t qp_num, uint32_t cq);

extern const struct soft_subsystem soft_trace_subsystem;

/* ---- refusal.c: why calls other than those that post are refused ----------------------------- */

/* The reason why the current call is refused, noted per thread.
 *
 * The code that finds the mistake returns soft_refuse(), which stores the note. The call ends with
 * soft_call_result() or soft_call_made(), which writes the record and clears the note. A note is
 * only used with the errno value that it was created for, so a failure without a note is recorded
 * with its errno value alone.
 */

struct soft_refusal_note {
	const char *reason; /* one of the reasons in aiordma/_core/trace_records.py, or NULL */
	int error;
	const char *field; /* name of the wrong argument, or NULL */
	uint64_t value; /* value of the argument */
	uint64_t limit; /* largest valid value; 0 if the mistake is another one */
	uint32_t attributes; /* enum ibv_qp_attr_mask */
};

/* Note why the current call is refused. Returns `error`. */
int soft_refuse(int error, const char *reason);
/* Note an invalid value of an argument. Returns EINVAL. */
int soft_refuse_value(const char *reason, const char *field, uint64_t value);
/* Note invalid attributes of ibv_modify_qp(3). Returns EINVAL. */
int soft_refuse_attributes(const char *reason, uint32_t attributes);

/* An argument and its largest valid value. */
struct soft_limit {
	const char *field;
	uint64_t value, most;
};

/* Note the first argument that is too large. Returns 0, or EINVAL if there is one. */
int soft_check_limits(const struct soft_limit *limits, size_t count);

/* Take the thread's note. Returns one without a reason if the note was created for another errno
 * value. */
struct soft_refusal_note soft_refusal_take(int error);

/* End `call` with `error` or 0, and record a failure. `owner` and `number` identify the object in
 * the trace; `owner` is NULL if there is none. The caller must not hold the lock. Preserves errno.
 * Returns `error`. */
int soft_call_result(const char *call, const char *owner, uint32_t number, int error);
/* End a call that returns a pointer, or NULL with errno set if it failed. Returns `object`. */
void *soft_call_made(const char *call, const char *owner, uint32_t number, void *object);

/* ---- trace_file.c: lines into a file --------------------------------------------------------- */

/* Open `path`, in which %p stands for the process ID. Returns 0 or an errno value. A file that
 * another user can read or has created is refused; soft_trace_file_refusal() describes the
 * reason. */
int soft_trace_file_open(const char *path);
const char *soft_trace_file_refusal(void);
/* Add a line including its newline. Returns 0, or an errno value after which the file must be
 * closed. */
int soft_trace_file_add(const char *line, size_t length);
/* Close the file with a last line, which replaces earlier lines if there is no room for it. */
void soft_trace_file_close(const char *line, size_t length);
/* Close the file without a last line. */
void soft_trace_file_forget(void);
/* Returns the path of the open file, or NULL. */
const char *soft_trace_file_path(void);
