/* What needs no id: rdma_getaddrinfo(3), rdma_get_devices(3). */
#include "cm_internal.h"

#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

/* ---- names --------------------------------------------------------------------------------- */

/* An answer, its addresses and its name in one piece of memory. */
struct answer {
	struct rdma_addrinfo info; /* the application's; first */
	struct sockaddr_storage address;
	struct sockaddr_storage source;
	char name[];
};

static bool is_datagram(const struct rdma_addrinfo *hints)
{
	if (hints->ai_qp_type)
		return hints->ai_qp_type == IBV_QPT_UD;
	return hints->ai_port_space == RDMA_PS_UDP || hints->ai_port_space == RDMA_PS_IPOIB;
}

static struct answer *answer_new(const struct rdma_addrinfo *hints, const char *name)
{
	size_t name_size = name ? strlen(name) + 1 : 0;
	struct answer *answer = calloc(1, sizeof(*answer) + name_size);

	if (!answer)
		return NULL;
	if (name)
		memcpy(answer->name, name, name_size);
	answer->info.ai_flags = hints->ai_flags;
	answer->info.ai_family = hints->ai_family;
	answer->info.ai_qp_type = hints->ai_qp_type;
	answer->info.ai_port_space = hints->ai_port_space;
	/* rdma_getaddrinfo(3): a source that was given in the hints is part of the answer. */
	if (hints->ai_src_addr && hints->ai_src_len) {
		memcpy(&answer->source, hints->ai_src_addr, hints->ai_src_len);
		answer->info.ai_src_addr = (struct sockaddr *)&answer->source;
		answer->info.ai_src_len = hints->ai_src_len;
	}
	return answer;
}

static struct answer *answer_found(const struct rdma_addrinfo *hints, const struct addrinfo *found)
{
	struct answer *answer = answer_new(hints, found->ai_canonname);
	struct rdma_addrinfo *info;
	bool datagram = is_datagram(hints);

	if (!answer)
		return NULL;
	info = &answer->info;
	info->ai_family = found->ai_family;
	if (!info->ai_qp_type)
		info->ai_qp_type = datagram ? IBV_QPT_UD : IBV_QPT_RC;
	if (!info->ai_port_space)
		info->ai_port_space = datagram ? RDMA_PS_UDP : RDMA_PS_TCP;
	memcpy(&answer->address, found->ai_addr, found->ai_addrlen);
	if (hints->ai_flags & RAI_PASSIVE) {
		info->ai_src_addr = (struct sockaddr *)&answer->address;
		info->ai_src_len = found->ai_addrlen;
		info->ai_src_canonname = found->ai_canonname ? answer->name : NULL;
		return answer;
	}
	info->ai_dst_addr = (struct sockaddr *)&answer->address;
	info->ai_dst_len = found->ai_addrlen;
	info->ai_dst_canonname = found->ai_canonname ? answer->name : NULL;
	return answer;
}

/* Without a name to look up, the answer is what the hints say, as it is. */
static struct answer *answer_of_hints(const struct rdma_addrinfo *hints)
{
	struct answer *answer = answer_new(hints, NULL);

	if (answer && hints->ai_dst_addr && hints->ai_dst_len) {
		memcpy(&answer->address, hints->ai_dst_addr, hints->ai_dst_len);
		answer->info.ai_dst_addr = (struct sockaddr *)&answer->address;
		answer->info.ai_dst_len = hints->ai_dst_len;
	}
	return answer;
}

/* An errno value for what getaddrinfo(3) returns. */
static int resolver_error(int code)
{
	switch (code) {
	case EAI_SYSTEM:
		return errno;
	case EAI_MEMORY:
		return ENOMEM;
	case EAI_AGAIN:
		return EAGAIN;
	case EAI_FAMILY:
		return EAFNOSUPPORT;
	case EAI_BADFLAGS:
	case EAI_SOCKTYPE:
		return EINVAL;
	default:
		return ENODATA; /* no such name, no such service, or none with an address */
	}
}

static int look_up(const char *node, const char *service, const struct rdma_addrinfo *hints,
		   struct addrinfo **found)
{
	struct addrinfo wanted = {.ai_family = hints->ai_flags & RAI_FAMILY || hints->ai_family
						       ? hints->ai_family
						       : AF_UNSPEC,
				  .ai_socktype = is_datagram(hints) ? SOCK_DGRAM : SOCK_STREAM};
	int code;

	if (hints->ai_flags & RAI_PASSIVE)
		wanted.ai_flags |= AI_PASSIVE;
	if (hints->ai_flags & RAI_NUMERICHOST)
		wanted.ai_flags |= AI_NUMERICHOST;
	code = getaddrinfo(node, service, &wanted, found);
	return code ? resolver_error(code) : 0;
}

/* RAI_NOROUTE changes nothing: routes are the host's, and are not looked up here. */
int soft_rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
			  struct rdma_addrinfo **res)
{
	static const struct rdma_addrinfo no_hints;
	struct rdma_addrinfo **next = res;
	struct addrinfo *found;
	int error;

	if (!res || (!node && !service && !hints))
		return soft_cm_fail(EINVAL);
	if (!hints)
		hints = &no_hints;
	if (hints->ai_src_len > sizeof(struct sockaddr_storage) ||
	    hints->ai_dst_len > sizeof(struct sockaddr_storage))
		return soft_cm_fail(EINVAL);
	*res = NULL;
	if (!node && !service) {
		struct answer *answer = answer_of_hints(hints);

		if (!answer)
			return soft_cm_fail(ENOMEM);
		*res = &answer->info;
		return 0;
	}
	error = look_up(node, service, hints, &found);
	if (error)
		return soft_cm_fail(error);
	for (const struct addrinfo *one = found; one; one = one->ai_next) {
		struct answer *answer = answer_found(hints, one);

		if (!answer) {
			soft_rdma_freeaddrinfo(*res);
			*res = NULL;
			freeaddrinfo(found);
			return soft_cm_fail(ENOMEM);
		}
		*next = &answer->info;
		next = &answer->info.ai_next;
	}
	freeaddrinfo(found);
	return 0;
}

void soft_rdma_freeaddrinfo(struct rdma_addrinfo *res)
{
	while (res) {
		struct rdma_addrinfo *next = res->ai_next;

		free(soft_container(res, struct answer, info));
		res = next;
	}
}

/* ---- devices ------------------------------------------------------------------------------- */

/* There is one device; it is open until the list is freed. */
struct ibv_context **soft_rdma_get_devices(int *num_devices)
{
	struct ibv_context **list = calloc(2, sizeof(*list)); /* ends with NULL */
	int error;

	if (!list)
		return NULL;
	error = soft_cm_device_get();
	if (error) {
		free(list);
		errno = error;
		return NULL;
	}
	list[0] = soft_cm_device_context();
	if (num_devices)
		*num_devices = 1;
	return list;
}

void soft_rdma_free_devices(struct ibv_context **list)
{
	if (!list)
		return;
	free(list);
	soft_cm_device_put();
}
