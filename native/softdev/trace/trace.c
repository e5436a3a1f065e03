/* The trace: what happens, put into lines. */
#define _GNU_SOURCE /* secure_getenv */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "objects/objects.h"
#include "trace.h"
#include "trace_line.h"
#include "trace_names.h"

enum {
	FORMAT_VERSION = 1,
	TEXT_MOST = 300
};

bool soft_trace_on;

static uint32_t requests; /* numbers given so far; 0 is none */
static pid_t asked;       /* the process that has read its environment */

static uint32_t next_request(void)
{
	requests += requests + 1 ? 1 : 2;
	return requests;
}

/* ---- lines ----------------------------------------------------------------------------------- */

#define BEGIN(line, type)                                                                          \
	struct soft_line line;                                                                     \
	line.length = 0;                                                                           \
	SOFT_LINE_TEXT(&line, "{\"t\":");                                                          \
	soft_line_number(&line, soft_now());                                                       \
	SOFT_LINE_TEXT(&line, ",\"type\":\"" type "\"")

static void finish(struct soft_line *line)
{
	SOFT_LINE_TEXT(line, "}\n");
}

/* The last line says why it is. */
static void stop(int error)
{
	BEGIN(line, "end");
	if (error)
		SOFT_LINE_NAME(&line, "error", strerror(error));
	finish(&line);
	soft_trace_on = false;
	soft_trace_file_close(line.text, line.length);
}

static void add(struct soft_line *line)
{
	finish(line);
	if (soft_trace_file_add(line->text, line->length))
		return;
	int error = soft_trace_file_error();

	fprintf(stderr, "aiordma: the trace %s ends here: %s\n", soft_trace_file_path(),
		strerror(error));
	stop(error);
}

/* ---- work requests --------------------------------------------------------------------------- */

struct flag_name {
	unsigned flag;
	const char *name;
};

/* The end of a list, of those that are set, one at least. */
static void add_names(struct soft_line *line, const struct flag_name *names, size_t count,
		      unsigned flags)
{
	for (size_t i = 0; i < count; i++)
		if (flags & names[i].flag)
			soft_line_add(line, names[i].name, strlen(names[i].name));
	line->text[line->length - 1] = ']';
}

static void add_flags(struct soft_line *line, unsigned flags)
{
	static const struct flag_name names[] = {
		{IBV_SEND_FENCE, "\"FENCE\","},
		{IBV_SEND_SIGNALED, "\"SIGNALED\","},
		{IBV_SEND_SOLICITED, "\"SOLICITED\","},
		{IBV_SEND_INLINE, "\"INLINE\","},
	};

	if (!flags)
		return;
	SOFT_LINE_TEXT(line, ",\"send_flags\":[");
	add_names(line, names, sizeof(names) / sizeof(names[0]), flags);
}

static void add_operation(struct soft_line *line, const struct soft_qp *qp, uint32_t index)
{
	const struct soft_send_wqe *send = soft_send_at(qp, index);

	switch (send->opcode) {
	case IBV_WR_SEND_WITH_IMM:
		SOFT_LINE_NUMBER(line, "imm_data", ntohl(send->immediate));
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		SOFT_LINE_NUMBER(line, "imm_data", ntohl(send->immediate));
		__attribute__((fallthrough));
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_WRITE:
	case IBV_WR_FLUSH:
		SOFT_LINE_NUMBER(line, "remote_addr", send->remote_address);
		SOFT_LINE_NUMBER(line, "rkey", send->rkey);
		break;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		SOFT_LINE_NUMBER(line, "invalidate_rkey", send->rkey);
		break;
	case IBV_WR_BIND_MW:
		SOFT_LINE_NUMBER(line, "rkey", send->rkey);
		break;
	default:
		break;
	}
	if (soft_qp_is_ud(qp))
		SOFT_LINE_NUMBER(line, "remote_qpn", soft_send_destination(qp, index)->qpn);
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND && !send->local)
		SOFT_LINE_NUMBER(line, "remote_srqn", send->remote_srqn);
}

static void trace_send(struct soft_qp *qp, uint32_t index)
{
	struct soft_send_wqe *send = soft_send_at(qp, index);

	send->request = next_request();
	BEGIN(line, "post_send");
	SOFT_LINE_NUMBER(&line, "request", send->request);
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NUMBER(&line, "wr_id", send->wr_id);
	SOFT_LINE_NAME(&line, "opcode", soft_wr_opcode_name(send->opcode));
	add_flags(&line, send->flags);
	SOFT_LINE_NUMBER(&line, "length", send->length);
	SOFT_LINE_NUMBER(&line, "num_sge", send->num_sge);
	add_operation(&line, qp, index);
	add(&line);
}

void soft_trace_sends(struct soft_qp *qp, uint32_t from)
{
	soft_assert_locked();
	for (; from != qp->sq.tail && soft_trace_on; from++)
		trace_send(qp, from);
}

static void add_receive(struct soft_line *line, const struct soft_recv_wqe *receive)
{
	SOFT_LINE_NUMBER(line, "wr_id", receive->wr_id);
	SOFT_LINE_NUMBER(line, "length", receive->length);
	SOFT_LINE_NUMBER(line, "num_sge", receive->num_sge);
	add(line);
}

void soft_trace_receives(struct soft_qp *qp, uint32_t from)
{
	for (; from != qp->rq.tail && soft_trace_on; from++) {
		struct soft_recv_wqe *receive = soft_receive_at(&qp->rq, from);

		receive->request = next_request();
		BEGIN(line, "post_recv");
		SOFT_LINE_NUMBER(&line, "request", receive->request);
		SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
		add_receive(&line, receive);
	}
}

void soft_trace_shared_receives(struct soft_srq *srq, uint32_t from)
{
	for (; from != srq->rq.tail && soft_trace_on; from++) {
		struct soft_recv_wqe *receive = soft_receive_at(&srq->rq, from);

		receive->request = next_request();
		BEGIN(line, "post_srq_recv");
		SOFT_LINE_NUMBER(&line, "request", receive->request);
		SOFT_LINE_NUMBER(&line, "srq", srq->ibv.handle);
		add_receive(&line, receive);
	}
}

static void add_refusal(struct soft_line *line, uint64_t wr_id, int error)
{
	SOFT_LINE_NUMBER(line, "wr_id", wr_id);
	SOFT_LINE_NUMBER(line, "errno", (uint64_t)error);
	SOFT_LINE_NAME(line, "error", strerror(error));
	add(line);
}

void soft_trace_refused_send(const struct soft_qp *qp, const struct ibv_send_wr *wr, int error)
{
	BEGIN(line, "refused");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NAME(&line, "opcode", soft_wr_opcode_name(wr->opcode));
	add_refusal(&line, wr->wr_id, error);
}

void soft_trace_refused_receive(const struct soft_qp *qp, const struct ibv_recv_wr *wr, int error)
{
	BEGIN(line, "refused");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	add_refusal(&line, wr->wr_id, error);
}

void soft_trace_refused_shared_receive(const struct soft_srq *srq, const struct ibv_recv_wr *wr,
				       int error)
{
	BEGIN(line, "refused");
	SOFT_LINE_NUMBER(&line, "srq", srq->ibv.handle);
	add_refusal(&line, wr->wr_id, error);
}

/* ---- what becomes of them -------------------------------------------------------------------- */

void soft_trace_completion(const struct soft_cq *cq, const struct ibv_wc *wc, uint32_t request,
			   bool lost)
{
	soft_assert_locked();
	BEGIN(line, "completion");
	SOFT_LINE_NUMBER(&line, "request", request);
	SOFT_LINE_NUMBER(&line, "cq", cq->ibv.handle);
	SOFT_LINE_NUMBER(&line, "qp_num", wc->qp_num);
	SOFT_LINE_NUMBER(&line, "wr_id", wc->wr_id);
	SOFT_LINE_NAME(&line, "status", soft_wc_status_name(wc->status));
	SOFT_LINE_NAME(&line, "opcode", soft_wc_opcode_name(wc->opcode));
	/* What has failed has no more than that: ibv_poll_cq(3). */
	if (wc->status == IBV_WC_SUCCESS) {
		SOFT_LINE_NUMBER(&line, "byte_len", wc->byte_len);
		if (wc->wc_flags & IBV_WC_GRH)
			SOFT_LINE_NUMBER(&line, "src_qp", wc->src_qp);
		if (wc->wc_flags & IBV_WC_WITH_IMM)
			SOFT_LINE_NUMBER(&line, "imm_data", ntohl(wc->imm_data));
		if (wc->wc_flags & IBV_WC_WITH_INV)
			SOFT_LINE_NUMBER(&line, "invalidated_rkey", wc->invalidated_rkey);
	}
	SOFT_LINE_TRUE(&line, "lost", lost);
	add(&line);
}

/* ---- queue pairs and events ------------------------------------------------------------------ */

void soft_trace_created(const struct soft_qp *qp)
{
	BEGIN(line, "create_qp");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NAME(&line, "qp_type", soft_qp_type_name(qp->ibv.qp_type));
	if (qp->ibv.send_cq)
		SOFT_LINE_NUMBER(&line, "send_cq", qp->ibv.send_cq->handle);
	if (qp->ibv.recv_cq)
		SOFT_LINE_NUMBER(&line, "recv_cq", qp->ibv.recv_cq->handle);
	if (qp->ibv.srq)
		SOFT_LINE_NUMBER(&line, "srq", qp->ibv.srq->handle);
	SOFT_LINE_TRUE(&line, "sq_sig_all", qp->sq_sig_all);
	add(&line);
}

void soft_trace_destroyed(const struct soft_qp *qp)
{
	BEGIN(line, "destroy_qp");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	add(&line);
}

void soft_trace_state(const struct soft_qp *qp, enum ibv_qp_state to)
{
	soft_assert_locked();
	if (qp->ibv.state == to)
		return;
	BEGIN(line, "qp_state");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NAME(&line, "cur_qp_state", soft_qp_state_name(qp->ibv.state));
	SOFT_LINE_NAME(&line, "qp_state", soft_qp_state_name(to));
	if (to == IBV_QPS_RTR && !soft_qp_is_ud(qp))
		SOFT_LINE_NUMBER(&line, "dest_qp_num", qp->attr.dest_qp_num);
	add(&line);
}

void soft_trace_event(const struct ibv_async_event *event)
{
	BEGIN(line, "async_event");
	SOFT_LINE_NAME(&line, "event_type", soft_event_name(event->event_type));
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		SOFT_LINE_NUMBER(&line, "cq", event->element.cq->handle);
		break;
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		SOFT_LINE_NUMBER(&line, "srq", event->element.srq->handle);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		SOFT_LINE_NUMBER(&line, "qp_num", event->element.qp->qp_num);
		break;
	default:
		SOFT_LINE_NUMBER(&line, "port_num", 1);
	}
	add(&line);
}

void soft_trace_retry(const struct soft_qp *qp, const char *cause)
{
	BEGIN(line, "retry");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NAME(&line, "cause", cause);
	add(&line);
}

void soft_trace_no_access(const struct soft_qp *qp, const char *reason, uint32_t rkey,
			  uint64_t address, uint64_t length, unsigned rights)
{
	static const struct flag_name names[] = {
		{IBV_ACCESS_REMOTE_WRITE, "\"REMOTE_WRITE\","},
		{IBV_ACCESS_REMOTE_READ, "\"REMOTE_READ\","},
		{IBV_ACCESS_REMOTE_ATOMIC, "\"REMOTE_ATOMIC\","},
		{IBV_ACCESS_FLUSH_GLOBAL, "\"FLUSH_GLOBAL\","},
		{IBV_ACCESS_FLUSH_PERSISTENT, "\"FLUSH_PERSISTENT\","},
	};

	BEGIN(line, "access_refused");
	SOFT_LINE_NUMBER(&line, "qp_num", qp->ibv.qp_num);
	SOFT_LINE_NAME(&line, "reason", reason);
	SOFT_LINE_NUMBER(&line, "rkey", rkey);
	if (rights) {
		SOFT_LINE_TEXT(&line, ",\"access\":[");
		add_names(&line, names, sizeof(names) / sizeof(names[0]), rights);
		SOFT_LINE_NUMBER(&line, "remote_addr", address);
		SOFT_LINE_NUMBER(&line, "length", length);
	}
	add(&line);
}

void soft_trace_fault(const char *fault, uint32_t qp_num, uint32_t cq)
{
	BEGIN(line, "fault");
	SOFT_LINE_NAME(&line, "fault", fault);
	if (qp_num)
		SOFT_LINE_NUMBER(&line, "qp_num", qp_num);
	if (cq)
		SOFT_LINE_NUMBER(&line, "cq", cq);
	add(&line);
}

/* ---- begin and end --------------------------------------------------------------------------- */

/* The beginning of a file of /proc, with `between` in place of zeros inside it. */
static void read_text(const char *path, char between, char *text, size_t size)
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
			text[i] = between;
}

/* Both clocks, read as near to each other as possible; the boot that the monotonic clock belongs
 * to; the process. */
static void add_header(void)
{
	char text[TEXT_MOST];
	struct timespec wall;

	BEGIN(line, "trace");
	clock_gettime(CLOCK_REALTIME, &wall);
	SOFT_LINE_NUMBER(&line, "version", FORMAT_VERSION);
	SOFT_LINE_NUMBER(&line, "realtime_ns", soft_nanoseconds(&wall));
	read_text("/proc/sys/kernel/random/boot_id", ' ', text, sizeof(text));
	SOFT_LINE_QUOTED(&line, "boot_id", text, TEXT_MOST);
	SOFT_LINE_NUMBER(&line, "pid", (uint64_t)getpid());
	read_text("/proc/self/cmdline", ' ', text, sizeof(text));
	SOFT_LINE_QUOTED(&line, "command", text, TEXT_MOST);
	if (gethostname(text, sizeof(text)))
		text[0] = '\0';
	text[sizeof(text) - 1] = '\0';
	SOFT_LINE_QUOTED(&line, "host", text, TEXT_MOST);
	SOFT_LINE_NAME(&line, "device", "embedded0");
	add(&line);
}

static int start(const char *path)
{
	if (soft_trace_on)
		return EBUSY;
	int rc = soft_trace_file_open(path);

	if (rc)
		return rc;
	soft_trace_on = true;
	add_header();
	return 0;
}

/* In the child of a fork: the trace is the parent's. */
static void forget(void)
{
	soft_trace_on = false;
	soft_trace_file_forget();
}

/* The engine starts: begin, if the environment asks for it. */
static int begin(void)
{
	const char *path = secure_getenv("AIORDMA_TRACE");

	if (!soft_trace_file_path())
		forget();
	if (asked == getpid() || !path || !*path || soft_trace_on)
		return 0;
	int rc = start(path);
	/* As in the middle of a trace, that does not end the program. */
	bool without = rc == ENOSPC || rc == EDQUOT || rc == EFBIG;

	if (rc)
		fprintf(stderr, "aiordma: AIORDMA_TRACE=%s: %s%s\n", path,
			rc == ESPIPE ? "not a regular file" : strerror(rc),
			without ? "; the program goes on without a trace" : "");
	if (rc && !without)
		return rc;
	asked = getpid();
	return 0;
}

static void pause_trace(void)
{
	soft_trace_file_trim();
}

const struct soft_subsystem soft_trace_subsystem = {
	.start = begin,
	.stop = pause_trace,
	.forked = forget,
};

int aiordma_trace_start(const char *path, char *used, size_t size)
{
	soft_lock();
	if (!soft_trace_file_path())
		forget();
	int rc = start(path);
	const char *name = soft_trace_file_path();

	if (name && size)
		snprintf(used, size, "%s", name);
	soft_unlock();
	return rc;
}

void aiordma_trace_flush(void)
{
	soft_lock();
	soft_trace_file_trim();
	soft_unlock();
}

void aiordma_trace_stop(void)
{
	soft_lock();
	if (soft_trace_file_path())
		stop(0);
	soft_unlock();
}

__attribute__((destructor)) static void at_exit(void)
{
	if (!soft_trace_file_path() || !soft_lock_soon())
		return;
	if (soft_trace_on)
		stop(0);
	soft_unlock();
}
