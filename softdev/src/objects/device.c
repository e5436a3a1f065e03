/* Devices, their attributes, and the contexts that applications open. */
#include <sys/stat.h>
#include <unistd.h>

#include "extended.h"

struct ibv_device **soft_ibv_get_device_list(int *num_devices)
{
	soft_lock();
	int count = soft_hca_count();
	struct ibv_device **list = calloc((size_t)count + 1, sizeof(*list)); /* ends with NULL */

	for (int i = 0; list && i < count; i++)
		list[i] = &soft_hca_at(i)->device;
	soft_unlock();
	if (!list)
		return soft_fail_create(ENOMEM);
	if (num_devices)
		*num_devices = count;
	return list;
}

void soft_ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

const char *soft_ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t length)
{
	for (const uint8_t *at = bytes; length--; at++)
		hash = (hash ^ *at) * 1099511628211u; /* FNV-1a */
	return hash;
}

/* Derive a locally administered GUID from the device number, the host name and the network
 * namespace. All processes in a namespace get the same GUID. Other hosts, and other containers with
 * the same host name, get different ones. GUIDs must differ because the kernel's connection manager
 * treats queue pairs with the same GUID and number as identical. */
uint64_t soft_ibv_get_device_guid(struct ibv_device *device)
{
	char name[256] = "";
	uint64_t hash = 14695981039346656037u;
	uint8_t guid[8] = {0x02, 0, 0, 0xff, 0xfe};
	struct stat network = {0};

	guid[1] = (uint8_t)(soft_container(device, struct soft_hca, device) -
			    soft_device.objects->hcas);
	gethostname(name, sizeof(name) - 1);
	(void)stat("/proc/self/ns/net", &network);
	hash = hash_bytes(hash, name, strlen(name));
	hash = hash_bytes(hash, &network.st_ino, sizeof(network.st_ino));
	memcpy(&guid[5], &hash, 3);
	memcpy(&hash, guid, sizeof(hash));
	return hash;
}

/* ---- contexts ------------------------------------------------------------------------------ */

/* Returns the number of completion vectors. It is one per processor, but at least two for programs
 * that use two queues. The number has no effect, because the thread that runs a step writes the
 * completions. */
static int comp_vectors(void)
{
	long processors = sysconf(_SC_NPROCESSORS_ONLN);

	return processors > 2 ? (int)processors : 2;
}

int soft_context_start(struct soft_context *context, struct ibv_device *device)
{
	int rc = soft_engine_get();

	if (rc)
		return rc;
	rc = soft_channel_init(&context->async);
	if (rc) {
		soft_engine_put();
		return rc;
	}
	context->fork_generation = soft_engine_fork_generation();
	soft_list_init(&context->async_events);
	soft_list_init(&context->qps);
	context->extended.sz = sizeof(context->extended);
	context->extended.create_srq_ex = soft_create_srq_ex;
	context->extended.get_srq_num = soft_get_srq_num;
	context->extended.context = (struct ibv_context){
		.abi_compat = AIORDMA_ABI_EXTENDED,
		.device = device,
		.ops =
			{
				._compat_query_device = soft_ibv_query_device,
				._compat_query_port = soft_ibv_query_port,
				.alloc_mw = soft_alloc_mw,
				.bind_mw = soft_bind_mw,
				.dealloc_mw = soft_dealloc_mw,
				.poll_cq = soft_poll_cq,
				.req_notify_cq = soft_req_notify_cq,
				.post_srq_recv = soft_post_srq_recv,
				.post_send = soft_post_send,
				.post_recv = soft_post_recv,
			},
		.cmd_fd = -1,
		.async_fd = context->async.fd,
		.num_comp_vectors = comp_vectors(),
	};
	soft_extend_context(&context->extended);
	pthread_mutex_init(&context->extended.context.mutex, NULL);
	soft_port_attach(context);
	return 0;
}

struct ibv_context *soft_ibv_open_device(struct ibv_device *device)
{
	struct soft_context *context = calloc(1, sizeof(*context));

	soft_engine_handle_lost_descriptors();
	int rc = context ? soft_context_start(context, device) : ENOMEM;

	if (!rc) {
		rc = soft_context_open_command_file(context);
		if (rc)
			soft_context_stop(context);
	}
	return rc ? soft_finish_create(rc, context) : &context->extended.context;
}

void soft_context_hold(struct soft_context *context)
{
	soft_assert_locked();
	context->children++;
}

void soft_context_stop(struct soft_context *context)
{
	soft_port_detach(context);
	soft_channel_destroy(&context->async);
	/* If the application has closed the descriptors, cmd_fd may belong to another file. */
	if (!soft_channel_has_lost_descriptors(&context->async))
		soft_close_fd(&context->extended.context.cmd_fd);
	pthread_mutex_destroy(&context->extended.context.mutex);
	if (!soft_context_is_inherited(context))
		soft_engine_put();
}

static void free_context(struct soft_context *context)
{
	soft_context_stop(context);
	free(context);
}

void soft_context_release(struct soft_context *context)
{
	soft_engine_handle_lost_descriptors();
	soft_lock();
	context->children--;
	bool last = context->children == 0 && context->closed;
	bool only_cm_pd_left = context->on_only_cm_pd_left && context->children == 1;

	soft_unlock();
	if (last)
		free_context(context);
	else if (only_cm_pd_left)
		context->on_only_cm_pd_left();
}

/* Close a context, but keep its objects until the application destroys them (ibv_close_device(3)).
 * Queue pairs stop immediately, so that peers can no longer access the application's memory.
 * Destroying the last object frees the context. */
int soft_ibv_close_device(struct ibv_context *ibv)
{
	struct soft_context *context = soft_context_of(ibv);

	if (context->on_only_cm_pd_left)
		return EINVAL; /* opened by the connection manager, not by the application */
	soft_engine_handle_lost_descriptors();
	soft_lock();
	context->closed = true;
	soft_list_each (struct soft_qp, qp, &context->qps, context_node)
		soft_qp_enter_reset(qp);
	soft_async_drop_events(context, NULL);
	bool last = context->children == 0;

	soft_unlock();
	if (last)
		free_context(context);
	return 0;
}

int soft_ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	*attr = (struct ibv_device_attr){
		.fw_ver = "1",
		.node_guid = soft_ibv_get_device_guid(context->device),
		.sys_image_guid = soft_ibv_get_device_guid(context->device),
		.max_mr_size = UINT64_MAX,
		.page_size_cap = ~(uint64_t)4095, /* all page sizes from 4 KiB */
		.vendor_id = 0xffffff, /* same as the kernel's software device; not an IEEE OUI */
		.vendor_part_id = 1,   /* 0 in the kernel's software device */
		.max_qp = SOFT_MAX_QP,
		.max_qp_wr = SOFT_MAX_QP_WR,
		.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID |
				    IBV_DEVICE_BAD_QKEY_CNTR | IBV_DEVICE_RC_RNR_NAK_GEN |
				    IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SRQ_RESIZE |
				    IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B |
				    IBV_DEVICE_MEM_MGT_EXTENSIONS | IBV_DEVICE_XRC,
		.max_sge = SOFT_MAX_SGE,
		.max_sge_rd = SOFT_MAX_SGE,
		.max_cq = SOFT_MAX_OBJECTS,
		.max_cqe = SOFT_MAX_CQE,
		.max_mr = SOFT_MAX_OBJECTS,
		.max_pd = SOFT_MAX_OBJECTS,
		.max_qp_rd_atom = SOFT_MAX_RD_ATOMIC,
		.max_res_rd_atom = SOFT_MAX_RD_ATOMIC * SOFT_MAX_QP,
		.max_qp_init_rd_atom = SOFT_MAX_RD_ATOMIC,
		/* Remote atomics use the CPU's atomic instructions, so they are also atomic with
		 * respect to local ones. */
		.atomic_cap = IBV_ATOMIC_GLOB,
		.max_mw = SOFT_MAX_OBJECTS,
		.max_srq = SOFT_MAX_OBJECTS,
		.max_srq_wr = SOFT_MAX_SRQ_WR,
		.max_srq_sge = SOFT_MAX_SGE,
		.max_ah = SOFT_MAX_AH,
		.max_mcast_grp = SOFT_MAX_MCAST_GRP,
		.max_mcast_qp_attach = SOFT_MAX_MCAST_QP,
		.max_total_mcast_qp_attach = SOFT_MAX_MCAST_ATTACH,
		.max_pkeys = 1,
		.local_ca_ack_delay = 15,
		.phys_port_cnt = 1,
	};
	return 0;
}

int soft_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *port_attr,
		    size_t length)
{
	struct soft_hca *hca = soft_hca_of(context);

	if (port_num != 1)
		return soft_call_result("ibv_query_port", NULL, 0,
					soft_refuse_value("PORT", "port_num", port_num));
	soft_lock();
	bool down = soft_ports_down & hca->port_bit;
	struct ibv_port_attr attr = {
		.state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = soft_links->active_mtu(hca),
		.lid = soft_links->lid(hca),
		.gid_tbl_len = hca->gid_count,
		.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
		.max_msg_sz = SOFT_MAX_MESSAGE,
		.qkey_viol_cntr = hca->bad_qkeys,
		.pkey_tbl_len = 1,
		.max_vl_num = 1,
		/* 4X HDR (200 Gb/s), which is faster than a CPU core copies. At lower rates, UCX
		 * copies long messages in 8 KiB pieces instead of posting them. */
		.active_width = 2,
		.active_speed = 64,
		.phys_state = down ? 3 : 5, /* Disabled, LinkUp */
		.link_layer = IBV_LINK_LAYER_ETHERNET,
	};
	soft_unlock();
	memset(port_attr, 0, length);
	memcpy(port_attr, &attr, length < sizeof(attr) ? length : sizeof(attr));
	return 0;
}

/* Query a port for a caller that was compiled with an older, shorter struct. Writing beyond the
 * last member of that struct, `flags`, would overwrite the caller's other memory. */
int soft_ibv_query_port(struct ibv_context *context, uint8_t port_num,
			struct _compat_ibv_port_attr *port_attr)
{
	return soft_query_port(context, port_num, (struct ibv_port_attr *)port_attr,
			       offsetof(struct ibv_port_attr, port_cap_flags2));
}
