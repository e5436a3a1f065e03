/* Life cycle of a queue pair's stream, from the handshake to the last frame.
 *
 * When a queue pair enters ERR, is reset or is destroyed, its stream is closed in an orderly way.
 * The last frame is a DISCONNECT, which contains the queue pair's last acknowledgement. A stream
 * that ends without DISCONNECT, for example because a process was killed, is broken.
 */
#include <unistd.h>

#include "inject/inject.h"
#include "cma_descriptor.h"

#define LINKS_VARIABLE "AIORDMA_EMBEDDED_LINKS"
#define LINGER_NS 2000000000u /* maximum wait for room for the last frame */

static void linger_expired(struct soft_timer *timer)
{
	soft_link_finish(soft_container(timer, struct soft_link, timer), 0);
}

void soft_link_flush(struct soft_link *link)
{
	soft_assert_locked();
	if (link->base.state == SOFT_LINK_CLOSING)
		soft_link_write_end(link);
	else if (!soft_ports_down || !link->chan.path ||
		 !(soft_ports_down & link->chan.path->ports))
		soft_link_write(link);
}

static void run_deferred_output(struct soft_deferred *deferred)
{
	soft_link_flush(soft_container(deferred, struct soft_link, base.output));
}

enum aiordma_wire soft_qp_wire(struct ibv_qp *qp)
{
	const struct soft_link *link;
	enum aiordma_wire name = AIORDMA_WIRE_NONE;

	soft_lock();
	link = soft_link_of(soft_qp_of(qp));
	if (link && link->base.state == SOFT_LINK_UP)
		name = link->chan.path ? link->chan.path->calls->name : AIORDMA_WIRE_NONE;
	soft_unlock();
	return name;
}

/* ---- life ---------------------------------------------------------------------------------- */

struct soft_link *soft_link_create(enum soft_link_state state)
{
	soft_assert_locked();
	struct soft_link *link = calloc(1, sizeof(*link));

	if (!link)
		return NULL;
	link->watch.fd = -1;
	link->chan.calls = &soft_link_chan_calls;
	link->base.state = state;
	soft_list_init(&link->delayed);
	soft_list_init(&link->base.output.node);
	link->base.output.run = run_deferred_output;
	soft_list_append(&soft_device.links->links, &link->node);
	return link;
}

int soft_link_up(struct soft_link *link, struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_tcp_path *tcp = soft_tcp_path_of(link->chan.path);

	if (!link->chan.path)
		return ECONNRESET;
	if (!soft_handshake_check_mtu(link, qp))
		return EPROTO;
	if (tcp) {
		/* A stream with a channel from a genuine peer no longer counts against the limits
		 * for unverified peers. */
		soft_place_release(&tcp->place);
		soft_timer_stop(&tcp->timer);
	}
	soft_timer_stop(&link->timer);
	link->timer.expired = linger_expired;
	link->base.state = SOFT_LINK_UP;
	link->base.is_lossy |= link->chan.path->calls->is_lossy;
	link->qp = qp;
	qp->link = &link->base;
	qp->no_peer = false;
	soft_link_set_liveness_limit(link);
	soft_cma_probe_path(link->chan.path);
	soft_timer_stop(&qp->reach_timer);
	if (soft_faults_set)
		soft_delay_attach(link);
	soft_qp_kick(qp);
	return 0;
}

void soft_link_detach(struct soft_link *link)
{
	soft_watch_close(&link->watch);
	soft_chan_end(&link->chan);
}

void soft_links_fault_spec_changed(void)
{
	soft_list_each (struct soft_link, link, &soft_device.links->links, node) {
		if (link->base.state == SOFT_LINK_UP)
			soft_delay_attach(link);
	}
}

void soft_link_lost(struct soft_link *link, int error)
{
	soft_assert_locked();
	if (!soft_delay_postpone_end(link, error))
		soft_link_finish(link, error);
}

void soft_link_finish(struct soft_link *link, int error)
{
	soft_assert_locked();
	struct soft_qp *qp = link->qp;
	/* While a path is being selected, the CM's stream already connects the queue pairs. */
	bool was_connected = link->base.state == SOFT_LINK_SELECTING ||
			     link->base.state == SOFT_LINK_UP ||
			     link->base.state == SOFT_LINK_CLOSING;

	if (link->base.state == SOFT_LINK_DEAD)
		return;
	link->base.state = SOFT_LINK_DEAD;
	soft_timer_stop(&link->timer);
	soft_deferred_cancel(&link->base.output);
	soft_ack_cancel(link);
	soft_list_remove(&link->node);
	soft_delay_detach(link);
	soft_cma_forget_link(link);
	soft_link_detach(link);
	if (qp) {
		link->qp = NULL;
		qp->link = NULL;
		if (was_connected)
			soft_qp_link_ended(qp, error);
	}
	if (!link->busy)
		free(link);
}

/* Start an orderly close of the queue pair's stream, and schedule the DISCONNECT frame as deferred
 * output. */
static void close_orderly(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_link *link = soft_link_of(qp);

	/* While a path is being selected, DISCONNECT is sent on the CM's stream. */
	if (link && link->base.state == SOFT_LINK_SELECTING) {
		soft_selection_use_tcp(link, false);
		link = soft_link_of(qp); /* NULL if the link has ended */
	}
	if (!link || link->base.state == SOFT_LINK_CLOSING || link->base.state == SOFT_LINK_DEAD)
		return;
	bool stream_ended =
		soft_delay_detach(link); /* packets in the delay queue no longer matter */

	if (link->base.state != SOFT_LINK_UP || stream_ended || link->to_self) {
		soft_link_finish(link, 0);
		return;
	}
	link->base.state = SOFT_LINK_CLOSING;
	soft_ack_cancel(link); /* DISCONNECT carries the delayed acknowledgement */
	soft_timer_start(&link->timer, soft_now() + LINGER_NS);
	soft_defer(&link->base.output);
}

void soft_link_close(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_link *link;

	/* Send DISCONNECT before the queue pair is detached, because the frame contains the queue
	 * pair's acknowledgement. */
	close_orderly(qp);
	link = soft_link_of(qp);
	if (!link)
		return;
	soft_deferred_cancel(&link->base.output);
	soft_link_write_end(link);
	link = soft_link_of(qp);
	if (!link)
		return; /* DISCONNECT has been sent */
	link->qp = NULL;
	qp->link = NULL;
}

bool soft_link_has_output(const struct soft_link *link)
{
	return link->base.state == SOFT_LINK_UP && !soft_list_empty(&link->base.output.node);
}

void soft_link_output_now(struct soft_link *link)
{
	soft_deferred_cancel(&link->base.output);
	soft_link_flush(link);
}

void soft_link_set_lossy(struct soft_link *link)
{
	if (link->base.is_lossy)
		return;
	link->base.is_lossy = true;
	link->base.loses_pending = !soft_qp_is_uc(link->qp);
	soft_link_output(link);
	soft_requester_start_timer(link->qp);
}

/* Write the frames that became pending while a port was down, after the port has come up. */
static void resume_output(void)
{
	soft_list_each (struct soft_link, link, &soft_device.links->links, node) {
		if (link->base.state == SOFT_LINK_UP && link->qp && !soft_port_is_down(link->qp)) {
			soft_timer_stop(&link->qp->reach_timer);
			soft_link_output(link);
		}
	}
}

/* Drop a RoCE link. The peer is not notified, because RoCE has no connection to close. */
static void drop_roce(struct soft_link *link)
{
	/* Detach the queue pair first, so that soft_link_finish() does not report a lost link. */
	link->qp->link = NULL;
	link->qp = NULL;
	soft_link_finish(link, 0);
}

void soft_qp_await_adoption(struct soft_qp *qp)
{
	soft_assert_locked();
	if (qp->link && !qp->stream_from_cm && qp->link->state < SOFT_LINK_SELECTING)
		close_orderly(qp);
	else if (qp->link && !qp->stream_from_cm && soft_device.links->roce)
		drop_roce(soft_link_of(qp));
	if (!qp->link)
		qp->stream_from_cm = true;
}

/* Create a link for a stream that the CM hands over, and store the link in `*link`. Returns 0, or
 * an errno value after closing `fd`. */
static int create_adopted_link(struct soft_link **link, struct soft_qp *qp, int fd)
{
	int rc = 0;

	soft_qp_await_adoption(qp);
	if (soft_qp_is_ud(qp) || (qp->ibv.state != IBV_QPS_RTR && qp->ibv.state != IBV_QPS_RTS))
		rc = EINVAL;
	else if (qp->link || qp->stream_lost)
		rc = EISCONN;
	if (!rc) {
		*link = soft_link_create(SOFT_LINK_CONNECTING);
		rc = *link ? 0 : ENOMEM;
	}
	if (rc)
		close(fd);
	return rc;
}

int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length)
{
	soft_assert_locked();
	struct soft_link *link;
	int rc = create_adopted_link(&link, qp, fd);

	if (rc)
		return rc;
	rc = soft_link_over_stream(link, fd);
	if (!rc)
		rc = soft_link_up(link, qp);
	if (rc)
		soft_link_finish(link, rc);
	else if (length)
		soft_tcp_path_input(soft_tcp_path_of(link->chan.path), already_read, length);
	return rc;
}

int soft_qp_adopt_or_attach(struct soft_qp *qp, int fd, uint16_t shm_port, uint16_t path_port,
			    bool is_initiator)
{
	soft_assert_locked();
	struct soft_link *link;
	int rc = create_adopted_link(&link, qp, fd);

	if (rc)
		return rc;
	link->path_port = path_port;
	link->is_initiator = is_initiator;
	rc = soft_selection_begin(link, qp, fd, shm_port);
	if (rc)
		soft_link_finish(link, rc);
	return rc;
}

/* ---- which paths links may use ------------------------------------------------------------- */

bool soft_links_may_use_shm(void)
{
	return soft_device.links->may_use_shm;
}

bool soft_links_are_roce(void)
{
	return soft_device.links->roce;
}

/* ---- callbacks ------------------------------------------------------------------------------ */

/* Complete the setup of a link whose queue pair has entered RTS, which makes its send PSN and its
 * timeout known (soft_link_calls.entered_rts). */
static void entered_rts(struct soft_qp *qp, bool from_rtr)
{
	if (from_rtr)
		soft_handshake_check_psn(qp);
	if (qp->link)
		soft_link_set_liveness_limit(soft_link_of(qp));
}

static enum ibv_mtu active_mtu(const struct soft_hca *hca)
{
	return soft_device.links->roce ? soft_roce_active_mtu(hca) : IBV_MTU_4096;
}

/* Derive a LID from the device GUID, which differs between hosts, containers and devices. RoCE
 * devices have no LID. */
static uint16_t derive_lid(struct soft_hca *hca)
{
	enum { UNICAST = 0xbfff }; /* the highest unicast LID */

	return soft_device.links->roce ? 0 : 1 + soft_ibv_get_device_guid(&hca->device) % UNICAST;
}

const struct soft_link_calls soft_links_calls = {
	.connect = soft_connect_begin,
	.reconnect = soft_reconnect,
	.entered_rts = entered_rts,
	.close = close_orderly,
	.detach = soft_link_close,
	.acknowledge = soft_ack_delay,
	.silence_limit = soft_liveness_limit,
	.revoke_requests = soft_cma_flush,
	.revoke_key = soft_cma_revoke_key,
	.active_mtu = active_mtu,
	.lid = derive_lid,
	.ip_port = soft_listener_port,
};

static void create(void)
{
	struct soft_links_state *links = soft_device.links = soft_alloc_part(sizeof(*links));

	soft_list_init(&links->links);
	soft_list_init(&links->delayed);
	soft_places_init(&links->pending_links);
	links->reserved = -1;
	soft_delay_create();
}

static int start(void)
{
	const char *setting = getenv(LINKS_VARIABLE);

	soft_device.links->may_use_shm = !setting || !*setting || !strcmp(setting, "shared");
	soft_device.links->roce = setting && !strcmp(setting, "roce");
	if (soft_device.links->may_use_shm || soft_device.links->roce || !strcmp(setting, "tcp"))
		return 0;
	return soft_misconfigured(EINVAL, LINKS_VARIABLE, setting,
				  "expected 'shared', 'tcp' or 'roce'");
}

static void stop(void)
{
	soft_listener_stop();
	soft_places_init(&soft_device.links->pending_links);
	soft_list_drain (struct soft_link, link, &soft_device.links->links, node)
		soft_link_finish(link, 0);
	soft_delay_stop();
}

/* Forget all links but do not free them, because inherited queue pairs refer to them and may still
 * be destroyed. */
static void forked(void)
{
	soft_places_init(&soft_device.links->pending_links);
	soft_list_clear(&soft_device.links->links);
	soft_list_clear(&soft_device.links->delayed);
	soft_engine_set_has_delayed_output(false);
	soft_listener_stop();
	soft_delay_stop();
}

static void port_changed(enum soft_port_change change, uint32_t ports)
{
	(void)ports;
	if (change == SOFT_PORT_UP)
		resume_output();
}

const struct soft_subsystem soft_links_subsystem = {
	.create = create,
	.start = start,
	.stop = stop,
	.forked = forked,
	.port_changed = port_changed,
	.send_delayed = soft_acks_send,
};
