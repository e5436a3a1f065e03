/* Name resolution: rdma_getaddrinfo(3). */
#include "cm_internal.h"

#include <netdb.h>

/* A result of rdma_getaddrinfo, allocated together with its addresses and name. */
struct lookup_result {
	struct rdma_addrinfo info; /* used by the application; first member */
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

static void set_address(struct sockaddr **address, socklen_t *length,
			struct sockaddr_storage *storage, const struct sockaddr *source,
			socklen_t source_length)
{
	memcpy(storage, source, source_length);
	*address = (struct sockaddr *)storage;
	*length = source_length;
}

/* Create a result from `hints` and `found`. If no name was looked up, `found` is NULL and the
 * result is a copy of the hints. Returns NULL if out of memory. */
static struct lookup_result *lookup_result_new(const struct rdma_addrinfo *hints,
					       const struct addrinfo *found)
{
	const char *name = found ? found->ai_canonname : NULL;
	bool passive = hints->ai_flags & RAI_PASSIVE, datagram = is_datagram(hints);
	struct lookup_result *result = calloc(1, sizeof(*result) + (name ? strlen(name) + 1 : 0));
	struct rdma_addrinfo *info;

	if (!result)
		return NULL;
	info = &result->info;
	info->ai_flags = hints->ai_flags;
	info->ai_family = found ? found->ai_family : hints->ai_family;
	info->ai_qp_type = hints->ai_qp_type;
	info->ai_port_space = hints->ai_port_space;
	/* The result includes the source address of the hints (rdma_getaddrinfo(3)). */
	if (hints->ai_src_addr && hints->ai_src_len)
		set_address(&info->ai_src_addr, &info->ai_src_len, &result->source,
			    hints->ai_src_addr, hints->ai_src_len);
	if (!found) {
		if (hints->ai_dst_addr && hints->ai_dst_len)
			set_address(&info->ai_dst_addr, &info->ai_dst_len, &result->address,
				    hints->ai_dst_addr, hints->ai_dst_len);
		return result;
	}
	if (!info->ai_qp_type)
		info->ai_qp_type = datagram ? IBV_QPT_UD : IBV_QPT_RC;
	if (!info->ai_port_space)
		info->ai_port_space = datagram ? RDMA_PS_UDP : RDMA_PS_TCP;
	set_address(passive ? &info->ai_src_addr : &info->ai_dst_addr,
		    passive ? &info->ai_src_len : &info->ai_dst_len, &result->address,
		    found->ai_addr, found->ai_addrlen);
	if (name)
		*(passive ? &info->ai_src_canonname : &info->ai_dst_canonname) =
			strcpy(result->name, name);
	return result;
}

/* Convert a getaddrinfo(3) error code to an errno value. */
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
		return ENODATA; /* unknown name or service, or name without an address */
	}
}

static int look_up(const char *node, const char *service, const struct rdma_addrinfo *hints,
		   struct addrinfo **found)
{
	struct addrinfo criteria = {.ai_family = hints->ai_flags & RAI_FAMILY || hints->ai_family
							 ? hints->ai_family
							 : AF_UNSPEC,
				    .ai_socktype = is_datagram(hints) ? SOCK_DGRAM : SOCK_STREAM};
	int code;

	if (hints->ai_flags & RAI_PASSIVE)
		criteria.ai_flags |= AI_PASSIVE;
	if (hints->ai_flags & RAI_NUMERICHOST)
		criteria.ai_flags |= AI_NUMERICHOST;
	code = getaddrinfo(node, service, &criteria, found);
	return code ? resolver_error(code) : 0;
}

/* Look up a name or service. Results never contain route data, because the device uses the host's
 * routes. RAI_NOROUTE therefore has no effect. */
int soft_rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
			  struct rdma_addrinfo **res)
{
	static const struct rdma_addrinfo no_hints;
	struct rdma_addrinfo **next = res;
	struct addrinfo *found = NULL;
	const struct addrinfo *address_info;
	int error = 0;

	if (!res || (!node && !service && !hints))
		return soft_cm_fail(EINVAL);
	if (!hints)
		hints = &no_hints;
	if (hints->ai_src_len > sizeof(struct sockaddr_storage) ||
	    hints->ai_dst_len > sizeof(struct sockaddr_storage))
		return soft_cm_fail(EINVAL);
	*res = NULL;
	if (node || service) {
		error = look_up(node, service, hints, &found);
		if (error)
			return soft_cm_fail(error);
	}
	address_info = found;
	do { /* without a lookup, a single result is a copy of the hints */
		struct lookup_result *result = lookup_result_new(hints, address_info);

		if (!result) {
			error = ENOMEM;
			soft_rdma_freeaddrinfo(*res);
			*res = NULL;
			break;
		}
		*next = &result->info;
		next = &result->info.ai_next;
		address_info = address_info ? address_info->ai_next : NULL;
	} while (address_info);
	if (found)
		freeaddrinfo(found);
	return error ? soft_cm_fail(error) : 0;
}

void soft_rdma_freeaddrinfo(struct rdma_addrinfo *res)
{
	while (res) {
		struct rdma_addrinfo *next = res->ai_next;

		free(soft_container(res, struct lookup_result, info));
		res = next;
	}
}
