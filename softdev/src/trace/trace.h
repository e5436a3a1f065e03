/* The trace of this process as JSON lines: work requests, completions, queue pair states and
 * asynchronous events. docs/trace.md describes the records.
 *
 * While tracing is off, each trace point costs one branch that is not taken. All functions except
 * those of refusal.c require the engine's lock, which also orders the records.
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
	uint32_t last_request; /* last request number assigned; 0 if none */
	const char *failure_reason; /* reason for the next failed completion, or NULL */
	uint32_t lkey; /* key to which `failure_reason` refers */
	uint64_t drops_until; /* when a full burst of drop records is allowed again */
	uint32_t drops_omitted; /* dropped packets not recorded since the last drop record */
	pid_t env_pid; /* process whose environment has been read */
	struct soft_trace_file {
		char path[PATH_MAX];
		int fd; /* -1 if none */
		pid_t pid;
		off_t end; /* offset of the end of the last line */
		rlim_t limit;
		char refusal[900]; /* reason for refusing the last file; empty if errno suffices */
	} file;
};

#define soft_trace_on (soft_device.trace->on)

/* Call soft_trace_EVENT() with the other arguments if tracing is on. */
#define SOFT_TRACE(event, ...)                                                                     \
	do {                                                                                       \
		if (__builtin_expect(soft_trace_on, false))                                        \
			soft_trace_##event(__VA_ARGS__);                                           \
	} while (0)

/* ---- trace.c: records, which are written with SOFT_TRACE() ---------------------------------- */

/* Record and number the send requests posted from index `from` on. The record of a completion
 * repeats the number of its request. */
void soft_trace_sends(struct soft_qp *qp, uint32_t from);
void soft_trace_receives(struct soft_qp *qp, uint32_t from);
void soft_trace_shared_receives(struct soft_srq *srq, uint32_t from);
/* Record a refused work request. `owner` and `number` are a trace field such as "qp_num" and its
 * value. `opcode` is -1 for a receive. */
void soft_trace_refused(const char *owner, uint32_t number, int opcode, uint64_t wr_id,
			const struct soft_refused *refusal);
/* Record a refused call that is not a post call (refusal.c). */
void soft_trace_call_refused(const char *call, const char *owner, uint32_t number, int error,
			     const struct soft_refusal_note *note);
/* Record a refused ibv_modify_qp(3) call that requested the state `to`. */
void soft_trace_modify_refused(const struct soft_qp *qp, enum ibv_qp_state to, int error,
			       const struct soft_refusal_note *note);

/* Record a completion. `request` is the number of the completed request, or 0 if it was posted
 * before the trace began. `lost` means that the completion queue was full. */
void soft_trace_completion(const struct soft_cq *cq, const struct ibv_wc *wc, uint32_t request,
			   bool lost);

void soft_trace_created(const struct soft_qp *qp);
void soft_trace_destroyed(const struct soft_qp *qp);
void soft_trace_state(const struct soft_qp *qp, enum ibv_qp_state to);
void soft_trace_event(const struct ibv_async_event *event);
/* Record that a queue pair retransmits requests after a loss or an RNR NAK. */
void soft_trace_retry(const struct soft_qp *qp, const char *cause);
/* Store the reason why the memory with the key `lkey` is not accessible. If the next completion
 * fails with a local protection error, its record contains the reason and the key. */
void soft_trace_failure_reason(const char *reason, uint32_t lkey);
void soft_trace_registered(const struct soft_range *range);
/* Record that a region has been deregistered or a window has been unbound. */
void soft_trace_key_ended(uint32_t key);
/* Record that a peer's request has been refused for a reason other than memory access. */
void soft_trace_request_refused(const struct soft_qp *qp, const char *reason);
/* Record that the queue pair's peer has been refused access to memory, with the reason
 * (soft_remote_denial_reason) and the requested access. If `rights` is 0, the peer wanted to
 * invalidate the window with this key. */
void soft_trace_access_refused(const struct soft_qp *qp, const char *reason, uint32_t rkey,
			       uint64_t address, uint64_t length, unsigned rights);
/* A dropped packet, whose sender does not learn the reason. Any host can cause these records, so
 * their rate is limited. */
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
/* Record an injected fault (inject.h). `qp_num` or `cq` identifies the affected queue; both are 0
 * if there is none. */
void soft_trace_fault(const char *fault, uint32_t qp_num, uint32_t cq);

extern const struct soft_subsystem soft_trace_subsystem;

/* ---- refusal.c: why calls other than those that post are refused ----------------------------- */

/* Each thread stores a note that explains why its current call is refused.
 *
 * The code that detects the error returns soft_refuse(), which stores the note. The call returns
 * through soft_call_result() or soft_call_pointer_result(), which write the record and clear the
 * note. A note is used only with the errno value for which it was created. A failure without a
 * matching note is recorded with its errno value alone.
 */

struct soft_refusal_note {
	const char *reason; /* one of the reasons in aiordma/_trace/records.py, or NULL */
	int error;
	const char *field; /* name of the invalid argument, or NULL */
	uint64_t value; /* value of the invalid argument */
	uint64_t limit; /* maximum valid value; 0 if no limit was exceeded */
	uint32_t attributes; /* attributes concerned (enum ibv_qp_attr_mask) */
};

/* Note why the current call is refused. Returns `error`. */
int soft_refuse(int error, const char *reason);
/* Note an argument with an invalid value. Returns EINVAL. */
int soft_refuse_value(const char *reason, const char *field, uint64_t value);
/* Note invalid attributes of ibv_modify_qp(3). Returns EINVAL. */
int soft_refuse_attributes(const char *reason, uint32_t attributes);

/* An argument and its largest valid value. */
struct soft_limit {
	const char *field;
	uint64_t value, max;
};

/* Check all arguments, and note the first one that exceeds its limit. Returns 0 or EINVAL. */
int soft_check_limits(const struct soft_limit *limits, size_t count);

/* Return and clear the thread's note. The note has no reason if it was created for a different
 * errno value. */
struct soft_refusal_note soft_refusal_take(int error);

/* Finish `call`, and record it as refused unless `error` is 0. `owner` and `number` identify the
 * object in the trace; `owner` is NULL if there is no object. The caller must not hold the lock.
 * Preserves errno. Returns `error`. */
int soft_call_result(const char *call, const char *owner, uint32_t number, int error);
/* Finish a call that returns a pointer, like soft_call_result(). If `object` is NULL, errno is the
 * error. Returns `object`. */
void *soft_call_pointer_result(const char *call, const char *owner, uint32_t number, void *object);

/* ---- trace_file.c: lines into a file --------------------------------------------------------- */

/* Open `path`, in which %p stands for the process ID. Returns 0 or an errno value. Refuses a file
 * that is not private to this user. soft_trace_file_refusal() then returns the reason. */
int soft_trace_file_open(const char *path);
const char *soft_trace_file_refusal(void);
/* Append a line, which must include its newline. Returns 0 or an errno value. After an error, the
 * caller must close the file. */
int soft_trace_file_add(const char *line, size_t length);
/* Write a final line and close the file. If the file cannot grow, the final line overwrites the
 * last lines of the file. */
void soft_trace_file_close(const char *line, size_t length);
/* Close the file without a final line. */
void soft_trace_file_abandon(void);
/* Returns the path of the file that this process has opened, or NULL. */
const char *soft_trace_file_path(void);
