/* Formats and writes the trace records. */
#define _GNU_SOURCE /* secure_getenv */
#include <arpa/inet.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "objects/objects.h"
#include "trace.h"
#include "trace_names.h"

#define VARIABLE "AIORDMA_TRACE"

enum { FORMAT_VERSION = 1, MAX_TEXT = 300, DROPS_PER_SECOND = 100 };

static uint32_t next_request_number(void)
{
	uint32_t *last = &soft_device.trace->last_request;

	return *last += *last + 1 ? 1 : 2; /* skip 0, which stands for a request without a number */
}

/* ---- lines ----------------------------------------------------------------------------------- */

struct line {
	size_t length;
	char text[4096]; /* longer than the longest line */
};

__attribute__((format(printf, 2, 3))) static void put(struct line *line, const char *format, ...)
{
	va_list values;

	va_start(values, format);
	line->length += (size_t)vsnprintf(line->text + line->length,
					  sizeof(line->text) - line->length, format, values);
	va_end(values);
}

static void put_number(struct line *line, const char *name, uint64_t value)
{
	put(line, ",\"%s\":%" PRIu64, name, value);
}

/* Add a string that needs no escaping. */
static void put_name(struct line *line, const char *name, const char *value)
{
	put(line, ",\"%s\":\"%s\"", name, value);
}

/* Add an untrusted string, escaping special characters. */
static void put_text(struct line *line, const char *name, const char *text)
{
	put(line, ",\"%s\":\"", name);
	for (; *text; text++) {
		uint8_t byte = (uint8_t)*text;
		bool plain = byte >= 0x20 && byte != '"' && byte != '\\' && byte != 0x7f;

		put(line, plain ? "%c" : "\\u%04x", byte);
	}
	put(line, "\"");
}

static struct line begin_line(const char *type)
{
	struct line line;

	line.length = 0;
	put(&line, "{\"t\":%" PRIu64, soft_now());
	put_name(&line, "type", type);
	return line;
}

static struct line begin_qp_line(const char *type, const struct soft_qp *qp)
{
	struct line line = begin_line(type);

	put_number(&line, "qp_num", qp->ibv.qp_num);
	return line;
}

/* End the trace with a record that contains the error, if any. */
static void stop(int error)
{
	struct line line = begin_line("end");

	if (error)
		put_name(&line, "error", strerror(error));
	put(&line, "}\n");
	soft_trace_on = false;
	soft_trace_file_close(line.text, line.length);
}

static void write_line(struct line *line)
{
	put(line, "}\n");
	int error = soft_trace_file_add(line->text, line->length);

	if (!error)
		return;
	fprintf(stderr, "aiordma: cannot continue the trace %s: %s\n", soft_trace_file_path(),
		strerror(error));
	stop(error);
}

/* ---- work requests --------------------------------------------------------------------------- */

struct flag_name {
	unsigned flag;
	const char *name;
};

/* Add an array with the names of the set flags. Flags without a name are omitted, and so is an
 * empty array. */
static void put_flags(struct line *line, const char *name, const struct flag_name *names,
		      size_t count, unsigned flags)
{
	bool any = false;

	for (size_t i = 0; i < count; i++) {
		if (!(flags & names[i].flag))
			continue;
		if (any)
			put(line, ",\"%s\"", names[i].name);
		else
			put(line, ",\"%s\":[\"%s\"", name, names[i].name);
		any = true;
	}
	if (any)
		put(line, "]");
}

static void put_operation(struct line *line, const struct soft_qp *qp, uint32_t index)
{
	const struct soft_send_wqe *send = soft_send_at(qp, index);

	switch (send->opcode) {
	case IBV_WR_SEND_WITH_IMM:
		put_number(line, "imm_data", ntohl(send->immediate));
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		put_number(line, "imm_data", ntohl(send->immediate));
		__attribute__((fallthrough));
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_WRITE:
	case IBV_WR_FLUSH:
		put_number(line, "remote_addr", send->remote_address);
		put_number(line, "rkey", send->rkey);
		break;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		put_number(line, "invalidate_rkey", send->rkey);
		break;
	case IBV_WR_BIND_MW:
		put_number(line, "rkey", send->rkey);
		break;
	default:
		break;
	}
	if (soft_qp_is_ud(qp))
		put_number(line, "remote_qpn", soft_send_destination(qp, index)->qpn);
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND && !send->local)
		put_number(line, "remote_srqn", send->remote_srqn);
}

static void trace_send(struct soft_qp *qp, uint32_t index)
{
	static const struct flag_name names[] = {
		{IBV_SEND_FENCE, "FENCE"},
		{IBV_SEND_SIGNALED, "SIGNALED"},
		{IBV_SEND_SOLICITED, "SOLICITED"},
		{IBV_SEND_INLINE, "INLINE"},
	};
	struct soft_send_wqe *send = soft_send_at(qp, index);

	send->trace_request = next_request_number();
	struct line line = begin_line("post_send");
	put_number(&line, "request", send->trace_request);
	put_number(&line, "qp_num", qp->ibv.qp_num);
	put_number(&line, "wr_id", send->wr_id);
	put_name(&line, "opcode", soft_wr_opcode_name(send->opcode));
	put_flags(&line, "send_flags", names, sizeof(names) / sizeof(names[0]), send->flags);
	put_number(&line, "length", send->length);
	put_number(&line, "num_sge", send->num_sge);
	put_operation(&line, qp, index);
	write_line(&line);
}

void soft_trace_sends(struct soft_qp *qp, uint32_t from)
{
	soft_assert_locked();
	for (; from != qp->sq.tail && soft_trace_on; from++)
		trace_send(qp, from);
}

/* Record the receives posted from index `from` on. `owner` and `number` identify the queue pair or
 * the shared receive queue. */
static void trace_receives(struct soft_receive_queue *rq, uint32_t from, const char *type,
			   const char *owner, uint32_t number)
{
	for (; from != rq->tail && soft_trace_on; from++) {
		struct soft_recv_wqe *receive = soft_receive_at(rq, from);
		struct line line = begin_line(type);

		receive->trace_request = next_request_number();
		put_number(&line, "request", receive->trace_request);
		put_number(&line, owner, number);
		put_number(&line, "wr_id", receive->wr_id);
		put_number(&line, "length", receive->length);
		put_number(&line, "num_sge", receive->num_sge);
		write_line(&line);
	}
}

void soft_trace_receives(struct soft_qp *qp, uint32_t from)
{
	trace_receives(&qp->rq, from, "post_recv", "qp_num", qp->ibv.qp_num);
}

void soft_trace_shared_receives(struct soft_srq *srq, uint32_t from)
{
	trace_receives(&srq->rq, from, "post_srq_recv", "srq", srq->ibv.handle);
}

static void put_failure(struct line *line, int error)
{
	put_number(line, "errno", (uint64_t)error);
	put_name(line, "error", strerror(error));
}

void soft_trace_refused(const char *owner, uint32_t number, int opcode, uint64_t wr_id,
			const struct soft_refused *refusal)
{
	struct line line = begin_line("refused");

	put_number(&line, owner, number);
	if (opcode >= 0)
		put_name(&line, "opcode", soft_wr_opcode_name((unsigned)opcode));
	put_number(&line, "wr_id", wr_id);
	put_name(&line, "reason", refusal->reason);
	put_failure(&line, refusal->error);
	write_line(&line);
}

/* ---- refused calls --------------------------------------------------------------------------- */

static const struct flag_name attributes[] = {
#define A(name) {IBV_QP_##name, #name}
	A(STATE),
	A(CUR_STATE),
	A(EN_SQD_ASYNC_NOTIFY),
	A(ACCESS_FLAGS),
	A(PKEY_INDEX),
	A(PORT),
	A(QKEY),
	A(AV),
	A(PATH_MTU),
	A(TIMEOUT),
	A(RETRY_CNT),
	A(RNR_RETRY),
	A(RQ_PSN),
	A(MAX_QP_RD_ATOMIC),
	A(ALT_PATH),
	A(MIN_RNR_TIMER),
	A(SQ_PSN),
	A(MAX_DEST_RD_ATOMIC),
	A(PATH_MIG_STATE),
	A(CAP),
	A(DEST_QPN),
	A(RATE_LIMIT),
#undef A
};

/* Add the reason for a refused call, and write the line. */
static void write_refusal_line(struct line *line, int error, const struct soft_refusal_note *note)
{
	if (note->reason)
		put_name(line, "reason", note->reason);
	if (note->field) {
		put_name(line, "field", note->field);
		put_number(line, "value", note->value);
	}
	if (note->limit)
		put_number(line, "limit", note->limit);
	put_flags(line, "attributes", attributes, sizeof(attributes) / sizeof(attributes[0]),
		  note->attributes);
	put_failure(line, error);
	write_line(line);
}

void soft_trace_call_refused(const char *call, const char *owner, uint32_t number, int error,
			     const struct soft_refusal_note *note)
{
	struct line line = begin_line("call_refused");

	put_name(&line, "call", call);
	if (owner)
		put_number(&line, owner, number);
	write_refusal_line(&line, error, note);
}

void soft_trace_modify_refused(const struct soft_qp *qp, enum ibv_qp_state to, int error,
			       const struct soft_refusal_note *note)
{
	struct line line = begin_line("call_refused");

	put_name(&line, "call", "ibv_modify_qp");
	put_number(&line, "qp_num", qp->ibv.qp_num);
	put_name(&line, "cur_qp_state", soft_qp_state_name(qp->ibv.state));
	put_name(&line, "qp_state", soft_qp_state_name(to));
	write_refusal_line(&line, error, note);
}

/* ---- completions ----------------------------------------------------------------------------- */

void soft_trace_completion(const struct soft_cq *cq, const struct ibv_wc *wc, uint32_t request,
			   bool lost)
{
	soft_assert_locked();
	struct soft_trace *trace = soft_device.trace;
	struct line line = begin_line("completion");
	put_number(&line, "request", request);
	put_number(&line, "cq", cq->ibv.handle);
	put_number(&line, "qp_num", wc->qp_num);
	put_number(&line, "wr_id", wc->wr_id);
	put_name(&line, "status", soft_wc_status_name(wc->status));
	put_name(&line, "opcode", soft_wc_opcode_name(wc->opcode));
	/* The remaining fields are valid only if the request succeeded (ibv_poll_cq(3)). */
	if (wc->status == IBV_WC_SUCCESS) {
		put_number(&line, "byte_len", wc->byte_len);
		if (wc->wc_flags & IBV_WC_GRH)
			put_number(&line, "src_qp", wc->src_qp);
		if (wc->wc_flags & IBV_WC_WITH_IMM)
			put_number(&line, "imm_data", ntohl(wc->imm_data));
		if (wc->wc_flags & IBV_WC_WITH_INV)
			put_number(&line, "invalidated_rkey", wc->invalidated_rkey);
	}
	/* The reason was noted for this completion only (soft_trace_failure_reason). */
	if (wc->status == IBV_WC_LOC_PROT_ERR && trace->failure_reason) {
		put_name(&line, "reason", trace->failure_reason);
		put_number(&line, "lkey", trace->lkey);
	}
	trace->failure_reason = NULL;
	if (lost)
		put(&line, ",\"lost\":true");
	write_line(&line);
}

void soft_trace_failure_reason(const char *reason, uint32_t lkey)
{
	soft_device.trace->failure_reason = reason;
	soft_device.trace->lkey = lkey;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static const struct flag_name accesses[] = {
	{IBV_ACCESS_LOCAL_WRITE, "LOCAL_WRITE"},
	{IBV_ACCESS_REMOTE_WRITE, "REMOTE_WRITE"},
	{IBV_ACCESS_REMOTE_READ, "REMOTE_READ"},
	{IBV_ACCESS_REMOTE_ATOMIC, "REMOTE_ATOMIC"},
	{IBV_ACCESS_MW_BIND, "MW_BIND"},
	{IBV_ACCESS_ZERO_BASED, "ZERO_BASED"},
	{IBV_ACCESS_ON_DEMAND, "ON_DEMAND"},
	{IBV_ACCESS_FLUSH_GLOBAL, "FLUSH_GLOBAL"},
	{IBV_ACCESS_FLUSH_PERSISTENT, "FLUSH_PERSISTENT"},
};

static void put_access(struct line *line, unsigned access)
{
	put_flags(line, "access", accesses, sizeof(accesses) / sizeof(accesses[0]), access);
}

void soft_trace_registered(const struct soft_range *range)
{
	struct line line = begin_line("reg_mr");

	put_number(&line, "key", range->key);
	put_number(&line, "pd", range->pd->handle);
	put_number(&line, "addr", range->start);
	put_number(&line, "length", range->length);
	put_access(&line, range->access & ~SOFT_ACCESS_PROCESS_VM);
	write_line(&line);
}

void soft_trace_key_ended(uint32_t key)
{
	struct line line = begin_line("key_ended");

	put_number(&line, "key", key);
	write_line(&line);
}

/* ---- queue pairs and events ------------------------------------------------------------------ */

void soft_trace_created(const struct soft_qp *qp)
{
	struct line line = begin_qp_line("create_qp", qp);
	put_name(&line, "qp_type", soft_qp_type_name(qp->ibv.qp_type));
	if (qp->ibv.pd)
		put_number(&line, "pd", soft_pd_root(qp->ibv.pd)->handle);
	if (qp->ibv.send_cq)
		put_number(&line, "send_cq", qp->ibv.send_cq->handle);
	if (qp->ibv.recv_cq)
		put_number(&line, "recv_cq", qp->ibv.recv_cq->handle);
	if (qp->ibv.srq)
		put_number(&line, "srq", qp->ibv.srq->handle);
	if (qp->sq_sig_all)
		put(&line, ",\"sq_sig_all\":true");
	write_line(&line);
}

void soft_trace_destroyed(const struct soft_qp *qp)
{
	struct line line = begin_qp_line("destroy_qp", qp);
	write_line(&line);
}

void soft_trace_state(const struct soft_qp *qp, enum ibv_qp_state to)
{
	soft_assert_locked();
	if (qp->ibv.state == to)
		return;
	struct line line = begin_qp_line("qp_state", qp);
	put_name(&line, "cur_qp_state", soft_qp_state_name(qp->ibv.state));
	put_name(&line, "qp_state", soft_qp_state_name(to));
	if (to == IBV_QPS_RTR && !soft_qp_is_ud(qp))
		put_number(&line, "dest_qp_num", qp->attr.dest_qp_num);
	write_line(&line);
}

void soft_trace_event(const struct ibv_async_event *event)
{
	struct line line = begin_line("async_event");
	put_name(&line, "event_type", soft_event_name(event->event_type));
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		put_number(&line, "cq", event->element.cq->handle);
		break;
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		put_number(&line, "srq", event->element.srq->handle);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		put_number(&line, "qp_num", event->element.qp->qp_num);
		break;
	default:
		put_number(&line, "port_num", 1);
	}
	write_line(&line);
}

void soft_trace_retry(const struct soft_qp *qp, const char *cause)
{
	struct line line = begin_qp_line("retry", qp);
	put_name(&line, "cause", cause);
	write_line(&line);
}

void soft_trace_access_refused(const struct soft_qp *qp, const char *reason, uint32_t rkey,
			       uint64_t address, uint64_t length, unsigned rights)
{
	struct line line = begin_qp_line("access_refused", qp);
	put_name(&line, "reason", reason);
	put_number(&line, "rkey", rkey);
	put_access(&line, rights);
	if (rights) {
		put_number(&line, "remote_addr", address);
		put_number(&line, "length", length);
	}
	write_line(&line);
}

void soft_trace_request_refused(const struct soft_qp *qp, const char *reason)
{
	struct line line = begin_qp_line("request_refused", qp);

	put_name(&line, "reason", reason);
	write_line(&line);
}

/* Take the record of a dropped packet from the allowance, or count the record as omitted if the
 * allowance is used up. DROPS_PER_SECOND limits both the average number of records per second and
 * the length of a burst. Returns whether the packet may be recorded. */
static bool consume_drop_allowance(struct soft_trace *trace)
{
	const uint64_t second = 1000000000, now = soft_now();

	if (trace->drops_until < now)
		trace->drops_until = now;
	if (trace->drops_until - now >= second) {
		trace->drops_omitted++;
		return false;
	}
	trace->drops_until += second / DROPS_PER_SECOND;
	return true;
}

static void put_address(struct line *line, const char *name, const union ibv_gid *gid)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	const bool ipv4 = !memcmp(gid->raw, mapped, sizeof(mapped));
	char text[INET6_ADDRSTRLEN];

	inet_ntop(ipv4 ? AF_INET : AF_INET6, gid->raw + (ipv4 ? 12 : 0), text, sizeof(text));
	put_name(line, name, text);
}

void soft_trace_dropped(const struct soft_drop *drop)
{
	soft_assert_locked();
	struct soft_trace *trace = soft_device.trace;

	if (!consume_drop_allowance(trace))
		return;
	struct line line = begin_line("dropped");

	put_name(&line, "reason", drop->reason);
	if (drop->qp_num)
		put_number(&line, "qp_num", drop->qp_num);
	if (drop->remote_qpn)
		put_number(&line, "remote_qpn", drop->remote_qpn);
	if (drop->remote)
		put_address(&line, "remote", drop->remote);
	if (drop->has_psn) {
		put_number(&line, "psn", drop->psn);
		put_number(&line, "expected_psn", drop->expected_psn);
	}
	if (trace->drops_omitted)
		put_number(&line, "omitted", trace->drops_omitted);
	trace->drops_omitted = 0;
	write_line(&line);
}

void soft_trace_fault(const char *fault, uint32_t qp_num, uint32_t cq)
{
	struct line line = begin_line("fault");
	put_name(&line, "fault", fault);
	if (qp_num)
		put_number(&line, "qp_num", qp_num);
	if (cq)
		put_number(&line, "cq", cq);
	write_line(&line);
}

/* ---- start and stop -------------------------------------------------------------------------- */

/* Read the beginning of a file in /proc, and replace inner null bytes with `separator`. */
static void read_text(const char *path, char separator, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? 0 : read(fd, text, size - 1);

	if (fd >= 0)
		close(fd);
	while (length > 0 && (!text[length - 1] || text[length - 1] == '\n'))
		length--;
	text[length > 0 ? length : 0] = '\0';
	for (ssize_t i = 0; i < length; i++)
		if (!text[i])
			text[i] = separator;
}

/* Store the names of all devices, separated by commas. If the devices have not been counted yet
 * (soft_hca_count), only the first one is named. */
static void get_device_names(char *text)
{
	const struct soft_objects *objects = soft_device.objects;

	strcpy(text, "embedded0");
	for (int i = 1; i < objects->hca_count; i++)
		sprintf(text + strlen(text), ",%s", objects->hcas[i].device.name);
}

/* Add the header, which contains the monotonic and wall-clock time, and describes the process. It
 * also contains the boot ID, because monotonic times of different boots are not comparable. The
 * clocks are read as close together as possible. */
static int add_header(void)
{
	char text[MAX_TEXT];
	struct timespec wall;

	struct line line = begin_line("trace");
	soft_device.platform->clock(CLOCK_REALTIME, &wall);
	put_number(&line, "version", FORMAT_VERSION);
	put_number(&line, "realtime_ns", soft_nanoseconds(&wall));
	read_text("/proc/sys/kernel/random/boot_id", ' ', text, sizeof(text));
	put_text(&line, "boot_id", text);
	put_number(&line, "pid", (uint64_t)getpid());
	read_text("/proc/self/cmdline", ' ', text, sizeof(text));
	put_text(&line, "command", text);
	if (gethostname(text, sizeof(text)))
		text[0] = '\0';
	text[sizeof(text) - 1] = '\0';
	put_text(&line, "host", text);
	get_device_names(text);
	put_name(&line, "device", text);
	put(&line, "}\n");
	return soft_trace_file_add(line.text, line.length);
}

static int start(const char *path)
{
	if (soft_trace_on)
		return EBUSY;
	int rc = soft_trace_file_open(path);

	if (!rc && (rc = add_header()))
		soft_trace_file_abandon();
	soft_trace_on = !rc;
	return rc;
}

/* Stop tracing in a forked child, because the trace belongs to the parent. */
static void abandon_trace(void)
{
	soft_trace_on = false;
	soft_trace_file_abandon();
}

/* Start a trace if the environment requests one. Called when the engine starts. */
static int start_from_environment(void)
{
	const char *path = secure_getenv(VARIABLE);

	if (!soft_trace_file_path()) /* no trace, or one that belongs to the parent process */
		abandon_trace();
	/* Read the environment once per process, so that the application can stop the trace. */
	if (soft_device.trace->env_pid == getpid() || !path || !*path || soft_trace_on)
		return 0;
	int rc = start(path);
	/* If the disk is full, continue without a trace, as if the disk had become full later. */
	if (rc == ENOSPC || rc == EDQUOT || rc == EFBIG)
		fprintf(stderr,
			"aiordma: " VARIABLE
			" is '%s': the program continues without a trace: %s\n",
			path, strerror(rc));
	else if (rc && *soft_trace_file_refusal())
		return soft_misconfigured(
			rc == ESPIPE ? EINVAL : rc, VARIABLE, path,
			"cannot write a trace there, because %s; name another file, "
			"or unset the variable",
			soft_trace_file_refusal());
	else if (rc)
		return soft_misconfigured(
			rc, VARIABLE, path,
			"cannot write a trace there; name a regular file that this "
			"process can write, or unset the variable");
	soft_device.trace->env_pid = getpid();
	return 0;
}

static void create(void)
{
	soft_device.trace = soft_alloc_part(sizeof(struct soft_trace));
	soft_device.trace->file.fd = -1;
}

const struct soft_subsystem soft_trace_subsystem = {
	.create = create,
	.start = start_from_environment,
	.forked = abandon_trace,
};

int aiordma_trace_start(const char *path, char *used, size_t size)
{
	soft_lock();
	if (!soft_trace_file_path())
		abandon_trace();
	int rc = start(path);
	const char *name = soft_trace_file_path();

	if (size)
		snprintf(used, size, "%s", name ? name : soft_trace_file_refusal());
	soft_unlock();
	return rc;
}

void aiordma_trace_stop(void)
{
	soft_lock();
	if (soft_trace_file_path())
		stop(0);
	soft_unlock();
}

/* End the trace when the process exits. The lock may never become free, because the thread that
 * held it may no longer exist. */
__attribute__((destructor)) static void at_exit(void)
{
	if (!soft_trace_file_path() || !soft_lock_timed())
		return;
	if (soft_trace_on)
		stop(0);
	soft_unlock();
}
