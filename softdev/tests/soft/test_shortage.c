/* Tests of shortages of memory, descriptors, threads and ports. Each call that creates an object is
 * repeated, and a different one of its requests for resources fails each time, until all have
 * failed once. When a request fails, the call must either fail with the same error and leak nothing
 * (the address sanitizer checks memory), or succeed without the resource. The call must then
 * succeed without a shortage. */
#define _GNU_SOURCE /* memfd_create */
#include "extended_side.h"
#include "leaks.h"
#include "path/shm/shm_internal.h"
#include "shortage.h"
#include "link/link_internal.h"

static struct side own; /* objects that the calls use */

/* An object to create and destroy. make() returns NULL and sets errno on failure. */
struct attempt {
	const char *name;
	void *(*make)(void);
	void (*end)(void *made);
};

static void try_with_shortages(const struct attempt *attempt)
{
	enum { MOST = 100 };
	int refused = 0, failures = 0;
	unsigned nth = 0;

	current_step = attempt->name;
	attempt->end(attempt->make()); /* create what is kept after the first call */
	do {
		int before = count_resources();

		errno = 0;
		shortage_begin(++nth);
		void *made = attempt->make();
		int error = errno;

		refused = shortage_end();
		if (made) {
			attempt->end(made);
		} else {
			CHECK(refused);
			CHECK_EQUAL(error, refused);
			failures++;
		}
		expect_resources(before);
		made = attempt->make();
		CHECK(made);
		attempt->end(made);
	} while (refused && nth < MOST);
	CHECK(nth < MOST);
	CHECK(failures > 0);
}

/* Convert `rc`, which is 0 or an errno value, to the return value of make(), and set errno. */
static void *object_if_ok(int rc)
{
	errno = rc;
	return rc ? NULL : &own;
}

static void keep(void *made)
{
	CHECK(made);
}

/* Define a make() or end() function that consists of a single call. */
#define MAKES(name, call)                                                                          \
	static void *name(void)                                                                    \
	{                                                                                          \
		return call;                                                                       \
	}
#define ENDS(name, call)                                                                           \
	static void name(void *made)                                                               \
	{                                                                                          \
		CHECK_EQUAL(call, 0);                                                              \
	}

/* Run a cleanup call without changing errno. */
#define KEEPING_ERRNO(call)                                                                        \
	do {                                                                                       \
		int error_ = errno;                                                                \
		call;                                                                              \
		errno = error_;                                                                    \
	} while (0)

/* ---- verbs --------------------------------------------------------------------------------- */

MAKES(device_list, verbs->ibv_get_device_list(NULL))

static void free_device_list(void *list)
{
	verbs->ibv_free_device_list(list);
}

static void *device_context(void)
{
	struct ibv_device **list = device_list();
	struct ibv_context *made = list ? verbs->ibv_open_device(list[0]) : NULL;

	KEEPING_ERRNO(free_device_list(list));
	return made;
}

ENDS(close_device_context, verbs->ibv_close_device(made))

MAKES(protection_domain, verbs->ibv_alloc_pd(own.context))

static void *parent_domain(void)
{
	struct ibv_parent_domain_init_attr attr = {.pd = own.pd};

	return extended(own.context)->alloc_parent_domain(own.context, &attr);
}

ENDS(dealloc_protection_domain, verbs->ibv_dealloc_pd(made))

static void *thread_domain(void)
{
	struct ibv_td_init_attr attr = {0};

	return extended(own.context)->alloc_td(own.context, &attr);
}

ENDS(dealloc_thread_domain, extended(own.context)->dealloc_td(made))

MAKES(memory_region, verbs->ibv_reg_mr(own.pd, own.memory, 4096, ALL_RIGHTS))

MAKES(null_region, extended(own.context)->alloc_null_mr(own.pd))

static void *file_region(void)
{
	int fd = memfd_create("test", MFD_CLOEXEC);
	void *made = NULL;

	CHECK(fd >= 0);
	CHECK_OK(ftruncate(fd, 4096));
	made = verbs->ibv_reg_dmabuf_mr(own.pd, 0, 4096, 0, fd, IBV_ACCESS_LOCAL_WRITE);
	KEEPING_ERRNO(close(fd));
	return made;
}

ENDS(deregister_region, verbs->ibv_dereg_mr(made))

MAKES(memory_window, own.context->ops.alloc_mw(own.pd, IBV_MW_TYPE_2))

ENDS(dealloc_memory_window, own.context->ops.dealloc_mw(made))

static struct ibv_dm *kept_memory;

static void *device_memory(void)
{
	struct ibv_alloc_dm_attr attr = {.length = 4096};

	return extended(own.context)->alloc_dm(own.context, &attr);
}

ENDS(free_device_memory, extended(own.context)->free_dm(made))

MAKES(device_region,
      extended(own.context)->reg_dm_mr(own.pd, kept_memory, 0, 4096, IBV_ACCESS_ZERO_BASED))

MAKES(completion_channel, verbs->ibv_create_comp_channel(own.context))

ENDS(destroy_completion_channel, verbs->ibv_destroy_comp_channel(made))

MAKES(completion_queue, verbs->ibv_create_cq(own.context, 16, NULL, own.channel, 0))

static void *cq_with_timestamps(void)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 16,
		.wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
	};

	return extended(own.context)->create_cq_ex(own.context, &attr);
}

ENDS(destroy_completion_queue, verbs->ibv_destroy_cq(made))

MAKES(resized_cq, object_if_ok(verbs->ibv_resize_cq(own.cq, 300)))

static void *make_qp(enum ibv_qp_type type, uint64_t operations)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = own.cq,
		.recv_cq = own.cq,
		.qp_type = type,
		.pd = own.pd,
		.comp_mask =
			IBV_QP_INIT_ATTR_PD | (operations ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0u),
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
		.send_ops_flags = operations,
	};

	return extended(own.context)->create_qp_ex(own.context, &attr);
}

MAKES(rc_qp, make_qp(IBV_QPT_RC, 0))

MAKES(extended_qp, make_qp(IBV_QPT_RC, IBV_QP_EX_WITH_SEND))

MAKES(ud_qp, make_qp(IBV_QPT_UD, 0))

ENDS(destroy_any_qp, verbs->ibv_destroy_qp(made))

static void *srq(void)
{
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};

	return verbs->ibv_create_srq(own.pd, &attr);
}

ENDS(destroy_srq, verbs->ibv_destroy_srq(made))

static void *address_handle(void)
{
	struct ibv_ah_attr attr = {.dlid = ANY_DLID, .is_global = 1, .port_num = 1};

	CHECK_OK(verbs->ibv_query_gid(own.context, 1, 0, &attr.grh.dgid));
	return verbs->ibv_create_ah(own.pd, &attr);
}

ENDS(destroy_address_handle, verbs->ibv_destroy_ah(made))

/* Build and post a request with wr_* calls (ibv_wr_post(3)). If memory for the batch cannot be
 * allocated, nothing is posted. */
static void *posted_batch(void)
{
	unsigned nth = shortage_in;

	shortage_in = 0;
	own.qp = extended_qp();
	CHECK(own.qp);
	struct address self = address_of_side(&own);

	bring_up(&own, &self);
	struct ibv_qp_ex *ex = verbs->ibv_qp_to_qp_ex(own.qp);

	shortage_in = nth;
	ex->wr_start(ex);
	ex->wr_send(ex);
	int rc = ex->wr_complete(ex);

	shortage_in = 0;
	enter_state(&own, IBV_QPS_ERR);
	if (!rc)
		expect_wc(&own, 0, IBV_WC_WR_FLUSH_ERR);
	expect_no_wc(&own);
	destroy_qp(&own);
	return object_if_ok(rc);
}

/* Move a queue pair to RTR. If memory for the responses cannot be allocated, the queue pair stays
 * in INIT. If its stream cannot be opened, the queue pair enters RTR and connects later. */
static void *rtr_transition(void)
{
	own.qp = rc_qp();
	if (!own.qp)
		return NULL;
	CHECK_OK(to_init(&own));
	struct address self = address_of_side(&own);
	int rc = to_rtr(&own, &self);

	CHECK_EQUAL(state_of(&own), rc ? IBV_QPS_INIT : IBV_QPS_RTR);
	destroy_qp(&own);
	return object_if_ok(rc);
}

/* ---- connection manager -------------------------------------------------------------------- */

MAKES(event_channel, verbs->rdma_create_event_channel())

static void destroy_event_channel(void *made)
{
	verbs->rdma_destroy_event_channel(made);
}

static void *cm_id(void)
{
	struct rdma_cm_id *id;

	return verbs->rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) ? NULL : id;
}

ENDS(destroy_cm_id, verbs->rdma_destroy_id(made))

MAKES(cm_devices, verbs->rdma_get_devices(NULL))

static void free_cm_devices(void *made)
{
	verbs->rdma_free_devices(made);
}

static void *address_info(void)
{
	struct rdma_addrinfo *found;

	return verbs->rdma_getaddrinfo("127.0.0.1", "7", NULL, &found) ? NULL : found;
}

static void free_address_info(void *made)
{
	verbs->rdma_freeaddrinfo(made);
}

/* Create a listening endpoint, which creates a queue pair for each request. */
static void *endpoint(void)
{
	struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP};
	struct ibv_qp_init_attr attr = {
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_addrinfo *found;
	struct rdma_cm_id *id = NULL;

	if (verbs->rdma_getaddrinfo("127.0.0.1", "0", &hints, &found))
		return NULL;
	if (!verbs->rdma_create_ep(&id, found, NULL, &attr) && verbs->rdma_listen(id, 1)) {
		KEEPING_ERRNO(verbs->rdma_destroy_ep(id));
		id = NULL;
	}
	KEEPING_ERRNO(verbs->rdma_freeaddrinfo(found));
	return id;
}

static void destroy_endpoint(void *made)
{
	verbs->rdma_destroy_ep(made);
}

/* Create an endpoint with a resolved route, a queue pair and its completion queues. */
static void *active_endpoint(void)
{
	struct ibv_qp_init_attr attr = {
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct rdma_addrinfo *found;
	struct rdma_cm_id *id = NULL;

	if (verbs->rdma_getaddrinfo("127.0.0.1", "7", NULL, &found))
		return NULL;
	if (verbs->rdma_create_ep(&id, found, NULL, &attr))
		id = NULL;
	KEEPING_ERRNO(verbs->rdma_freeaddrinfo(found));
	return id;
}

/* A listener pauses when descriptors run out. If it cannot be added to epoll after the pause, it
 * pauses again. */
static void paused_listener_resumes_after_shortage(struct soft_acceptor *acceptor)
{
	struct soft_timer *pause = &acceptor->pause;
	struct soft_fd_watch *listener = &acceptor->watch;

	soft_lock();
	CHECK(listener->watched);
	soft_unwatch(listener);
	shortage_begin(1);
	pause->expired(pause);
	CHECK(shortage_end());
	CHECK(pause->running);
	soft_timer_stop(pause);
	pause->expired(pause);
	CHECK(listener->watched && !pause->running);
	soft_unlock();
}

int main(void)
{
	static const struct attempt without_device[] = {
		{"device_list", device_list, free_device_list},
		{"device_context", device_context,
		 close_device_context}, /* starts and stops the engine */
		{"event_channel", event_channel, destroy_event_channel},
		{"cm_id", cm_id, destroy_cm_id},
		{"cm_devices", cm_devices, free_cm_devices},
		{"address_info", address_info, free_address_info},
		{"endpoint", endpoint, destroy_endpoint},
		{"active_endpoint", active_endpoint, destroy_endpoint},
	};
	static const struct attempt with_device[] = {
		{"device_context", device_context, close_device_context},
		{"protection_domain", protection_domain, dealloc_protection_domain},
		{"parent_domain", parent_domain, dealloc_protection_domain},
		{"thread_domain", thread_domain, dealloc_thread_domain},
		{"memory_region", memory_region, deregister_region},
		{"null_region", null_region, deregister_region},
		{"file_region", file_region, deregister_region},
		{"memory_window", memory_window, dealloc_memory_window},
		{"device_memory", device_memory, free_device_memory},
		{"device_region", device_region, deregister_region},
		{"completion_channel", completion_channel, destroy_completion_channel},
		{"completion_queue", completion_queue, destroy_completion_queue},
		{"cq_with_timestamps", cq_with_timestamps, destroy_completion_queue},
		{"resized_cq", resized_cq, keep},
		{"rc_qp", rc_qp, destroy_any_qp},
		{"extended_qp", extended_qp, destroy_any_qp},
		{"ud_qp", ud_qp, destroy_any_qp},
		{"srq", srq, destroy_srq},
		{"address_handle", address_handle, destroy_address_handle},
		{"posted_batch", posted_batch, keep},
		{"rtr_transition", rtr_transition, keep},
	};

	limit_seconds(60);
	FOR_EACH (i, without_device)
		try_with_shortages(&without_device[i]);
	OPEN(&own);
	STEP(paused_listener_resumes_after_shortage(&soft_device.links->listening[0].acceptor));
	STEP(paused_listener_resumes_after_shortage(&soft_device.shm->acceptor));
	destroy_qp(&own);
	kept_memory = device_memory();
	CHECK(kept_memory);
	FOR_EACH (i, with_device)
		try_with_shortages(&with_device[i]);
	free_device_memory(kept_memory);
	close_side(&own);
	return 0;
}
