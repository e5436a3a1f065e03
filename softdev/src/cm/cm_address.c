/* Addresses and ports: rdma_bind_addr(3), rdma_resolve_addr(3), rdma_resolve_route(3).
 *
 * The port of an id is a TCP port of the host, or a UDP port for RDMA_PS_UDP. Binding an id creates
 * and binds the socket that later listens or connects. Port conflicts are therefore detected
 * immediately, even between processes.
 *
 * Resolving an address connects a UDP socket to the destination, so that the kernel looks up the
 * route and selects the source address. This finishes before the call returns, but applications
 * still get an event.
 */
#include "cm_internal.h"

#include <assert.h>
#include <unistd.h>

socklen_t soft_cm_address_length(const struct sockaddr *address)
{
	if (address && address->sa_family == AF_INET)
		return sizeof(struct sockaddr_in);
	if (address && address->sa_family == AF_INET6)
		return sizeof(struct sockaddr_in6);
	return 0;
}

bool soft_cm_is_any(const struct sockaddr *address)
{
	const struct sockaddr_in *v4 = (const void *)address;
	const struct sockaddr_in6 *v6 = (const void *)address;

	return address->sa_family == AF_INET ? v4->sin_addr.s_addr == htonl(INADDR_ANY)
					     : IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
}

/* Returns a pointer to the port, which is in network byte order. Its offset is the same in both
 * address families. */
static in_port_t *port_in(struct sockaddr *address)
{
	static_assert(offsetof(struct sockaddr_in, sin_port) ==
			      offsetof(struct sockaddr_in6, sin6_port),
		      "the port has the same offset in both");
	return &((struct sockaddr_in *)(void *)address)->sin_port;
}

static uint16_t port_of(const struct sockaddr *address)
{
	const struct sockaddr_in *known = (const void *)address;

	return soft_cm_address_length(address) ? known->sin_port : 0;
}

static void fill_gids(struct soft_cm_id *id)
{
	struct rdma_addr *addresses = &id->id.route.addr;

	soft_gid_from_sockaddr(&addresses->addr.ibaddr.sgid, &addresses->src_addr);
	soft_gid_from_sockaddr(&addresses->addr.ibaddr.dgid, &addresses->dst_addr);
	addresses->addr.ibaddr.pkey = htons(0xffff); /* the default partition (IBTA 10.9.1.2) */
}

void soft_cm_apply_tos(int fd, uint8_t tos)
{
	/* The option for the other address family may fail. Errors are ignored because the type of
	 * service is only a hint. */
	(void)soft_set_option(fd, IPPROTO_IP, IP_TOS, tos);
	(void)soft_set_option(fd, IPPROTO_IPV6, IPV6_TCLASS, tos);
}

/* ---- binding ------------------------------------------------------------------------------- */

/* Bind the socket with the port sharing rules of rdma_cm(7). A port is in use while another socket
 * is bound to it or listens on it. A port is free if only connections of a former listener remain,
 * including those in TIME_WAIT.
 *
 * Without SO_REUSEADDR, Linux refuses to bind a free port that still has connections. If all
 * sockets set SO_REUSEADDR, Linux also allows several sockets to bind the same port. Therefore try
 * without the option first, and then with it. Clear the option after binding. cm_stream.c sets it
 * again when the socket listens or connects.
 */
static int bind_socket(int fd, const struct sockaddr *address, bool reuse, int type)
{
	socklen_t length = soft_cm_address_length(address);
	int error;

	/* UDP sockets never need SO_REUSEADDR, because they leave no connections behind. The option
	 * would let two sockets share a port. */
	error = reuse && type != SOCK_DGRAM ? soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1) : 0;
	if (!error && bind(fd, address, length))
		error = errno;
	if (error != EADDRINUSE || reuse || type == SOCK_DGRAM)
		return error;
	/* EADDRINUSE without a requested port means that connections, mostly in TIME_WAIT, use all
	 * ephemeral ports. Let connect() choose a port, because it can use the same port for
	 * several destinations. */
	error = port_of(address) ? soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1)
				 : soft_set_option(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
	if (!error && bind(fd, address, length))
		error = errno;
	if (!error && port_of(address))
		error = soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 0);
	return error;
}

/* Returns whether a socket that is bound to the wildcard address uses the port. Try to bind the
 * port on a documentation address (TEST-NET-1 or 2001:db8::/32). No interface has this address, so
 * only a wildcard socket can conflict with it. */
static bool is_bound_to_wildcard(const struct sockaddr *address, int type)
{
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6;
	} other = {.any.sa_family = address->sa_family};
	int fd = socket(address->sa_family, type | SOCK_CLOEXEC, 0);
	bool taken = false;

	if (fd < 0)
		return false;
	if (address->sa_family == AF_INET)
		other.v4.sin_addr.s_addr = htonl(0xc0000253);
	else
		other.v6.sin6_addr = (struct in6_addr){.s6_addr = {0x20, 0x01, 0x0d, 0xb8, 0x53}};
	*port_in(&other.any) = port_of(address);
	/* On IPv6 sockets, IP_FREEBIND sets the same flag as IPV6_FREEBIND
	 * (net/ipv6/ipv6_sockglue.c). */
	if (!soft_set_option(fd, IPPROTO_IP, IP_FREEBIND, 1))
		taken = bind(fd, &other.any, soft_cm_address_length(address)) &&
			errno == EADDRINUSE;
	close(fd);
	return taken;
}

int soft_cm_port_error(const struct sockaddr *address, int type, int error)
{
	/* See cma_check_port in drivers/infiniband/core/cma.c. */
	return error == EADDRINUSE &&
			       (soft_cm_is_any(address) || is_bound_to_wildcard(address, type))
		       ? EADDRNOTAVAIL
		       : error;
}

static int open_bound_socket(const struct soft_cm_id *id, const struct sockaddr *address,
			     bool v6_only, int *result)
{
	int type = soft_cm_is_datagram_id(id) ? SOCK_DGRAM : SOCK_STREAM;
	int fd = socket(address->sa_family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	int error = 0;

	if (fd < 0)
		return errno;
	if (address->sa_family == AF_INET6)
		error = soft_set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, v6_only);
	if (!error)
		error = bind_socket(fd, address, id->reuse, type);
	if (error) {
		close(fd);
		return soft_cm_port_error(address, type, error);
	}
	*result = fd;
	return 0;
}

static int reserve_simulated(struct soft_cm_id *id, const struct sockaddr *address)
{
	struct rdma_addr *addresses = &id->id.route.addr;
	int type = soft_cm_is_datagram_id(id) ? SOCK_DGRAM : SOCK_STREAM, fd;
	union ibv_gid own;

	if (!soft_cm_is_any(address) &&
	    !(soft_gid_from_sockaddr(&own, address) && soft_gid_is_on_this_host(&own)))
		return EADDRNOTAVAIL;
	memcpy(&addresses->src_storage, address, soft_cm_address_length(address));
	fd = soft_device.platform->network->reserve(&addresses->src_addr, type);
	if (fd < 0)
		return -fd;
	id->sock = fd;
	id->state = SOFT_CM_BOUND;
	return 0;
}

int soft_cm_bind(struct soft_cm_id *id, const struct sockaddr *address)
{
	socklen_t length = sizeof(id->id.route.addr.src_storage);

	if (soft_device.platform->network)
		return reserve_simulated(id, address);
	int error = open_bound_socket(id, address, id->v6_only, &id->sock);

	if (error)
		return error;
	if (id->tos)
		soft_cm_apply_tos(id->sock, id->tos);
	if (getsockname(id->sock, &id->id.route.addr.src_addr, &length)) {
		error = errno;
		close(id->sock);
		id->sock = -1;
		return error;
	}
	id->state = SOFT_CM_BOUND;
	return 0;
}

int soft_cm_rebind(struct soft_cm_id *id, bool v6_only)
{
	const struct sockaddr *address = &id->id.route.addr.src_addr;
	int error;

	if (id->v6_only == v6_only || soft_device.platform->network)
		return 0;
	close(id->sock);
	id->sock = -1;
	error = open_bound_socket(id, address, v6_only, &id->sock);
	if (!error)
		id->v6_only = v6_only;
	else if (open_bound_socket(id, address, id->v6_only, &id->sock))
		return EIO; /* lost the port to another process */
	return error;
}

/* Returns whether binding to the address also binds the id to a device. A specific address does,
 * but the wildcard does not (rdma_bind_addr(3)). Unlike in the kernel's rdma_cm (cma_any_addr in
 * drivers/infiniband/core/cma.c), a loopback address also does, unless the id is synchronous.
 * libfabric binds a synchronous id to find the address to listen on, and would then listen on only
 * one device. */
static bool selects_device(const struct soft_cm_id *id, const struct sockaddr *address)
{
	union ibv_gid gid;

	soft_gid_from_sockaddr(&gid, address);
	return !soft_cm_is_any(address) &&
	       !(id->synchronous && (!memcmp(&gid, &soft_gid_loopback, sizeof(gid)) ||
				     !memcmp(&gid, &in6addr_loopback, sizeof(gid))));
}

/* Bind the id to the address, and to a device if the address selects one. The caller must hold the
 * lock, and the devices must be open. */
static int bind_id(struct soft_cm_id *id, const struct sockaddr *address)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_BIND);

	if (!error && selects_device(id, address))
		error = soft_cm_device_error(address);
	if (!error)
		error = soft_cm_bind(id, address);
	if (error)
		return error;
	if (selects_device(id, address)) {
		soft_cm_device_bind(id);
		soft_gid_from_sockaddr(&id->id.route.addr.addr.ibaddr.sgid, address);
	}
	return 0;
}

int soft_rdma_bind_addr(struct rdma_cm_id *application, struct sockaddr *addr)
{
	struct soft_cm_id *id;

	if (!soft_cm_address_length(addr))
		return soft_cm_fail(EINVAL);
	id = soft_cm_enter_device(application);
	return id ? soft_cm_leave_device(bind_id(id, addr)) : -1;
}

/* ---- resolving ----------------------------------------------------------------------------- */

/* Returns whether the address belongs to a device other than the first. The kernel would select
 * 127.0.0.1 as the source for this address, but 127.0.0.1 belongs to the first device. The source
 * must be the address itself, because its device has no other. */
static bool is_on_secondary_device(const struct sockaddr *address)
{
	union ibv_gid gid;

	return soft_gid_from_sockaddr(&gid, address) &&
	       soft_gid_port_bit(&gid) != soft_hca_at(0)->port_bit;
}

/* Find the source address for reaching `target`. The port of `source` is set to 0. `wanted` is the
 * source address that the application requests, which may be NULL or the wildcard. Returns 0 or an
 * errno value. */
static int find_source(const struct sockaddr *target, const struct sockaddr *wanted,
		       struct sockaddr_storage *source)
{
	const struct soft_network *network = soft_device.platform->network;
	socklen_t length = sizeof(*source);
	union ibv_gid gid, own;
	int error = 0;

	soft_gid_from_sockaddr(&gid, target);
	/* A loopback source can reach only this host. */
	if (wanted && soft_gid_from_sockaddr(&own, wanted) && soft_gid_is_loopback(&own))
		error = soft_gid_route(&own, &gid);
	if (error)
		return error;
	if (network) { /* this host is simulated */
		const bool is_on_this_host = soft_gid_is_on_this_host(&gid);
		const int device = network->device_to(&gid);

		if (!is_on_this_host && device < 0)
			return ENETUNREACH;
		own = is_on_this_host ? gid : network->address(device);
		if (wanted && !soft_cm_is_any(wanted))
			soft_gid_from_sockaddr(&own, wanted);
		soft_gid_to_sockaddr(&own, &own, 0, source);
		return is_on_this_host || network->device_to(&own) == device ? 0 : EINVAL;
	}
	int fd = socket(target->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return errno;
	if ((!wanted || soft_cm_is_any(wanted)) && is_on_secondary_device(target))
		wanted = target;
	if (wanted && !soft_cm_is_any(wanted)) {
		memcpy(source, wanted, soft_cm_address_length(wanted));
		*port_in((struct sockaddr *)source) = 0;
		if (bind(fd, (struct sockaddr *)source, soft_cm_address_length(wanted)))
			error = errno;
	}
	if (!error && connect(fd, target, soft_cm_address_length(target)))
		error = errno;
	if (!error && getsockname(fd, (struct sockaddr *)source, &length))
		error = errno;
	close(fd);
	if (!error)
		*port_in((struct sockaddr *)source) = 0;
	return error;
}

/* Set the id's destination address. Replace the wildcard with the loopback address, as sockets and
 * the kernel's rdma_cm do. */
static void set_destination(struct soft_cm_id *id, const struct sockaddr *destination)
{
	struct rdma_addr *addresses = &id->id.route.addr;

	memset(&addresses->dst_storage, 0, sizeof(addresses->dst_storage));
	memcpy(&addresses->dst_storage, destination, soft_cm_address_length(destination));
	if (!soft_cm_is_any(destination))
		return;
	if (destination->sa_family == AF_INET)
		addresses->dst_sin.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	else
		addresses->dst_sin6.sin6_addr = in6addr_loopback;
}

static int resolve(struct soft_cm_id *id, const struct sockaddr *source,
		   const struct sockaddr *destination)
{
	struct rdma_addr *addresses = &id->id.route.addr;
	struct sockaddr_storage local;
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_RESOLVE_ADDR);

	if (error)
		return error;
	if (id->state == SOFT_CM_IDLE && source) {
		error = bind_id(id, source);
		if (error)
			return error;
	}
	/* From here on, `source` is the address to which the id is bound, or NULL. */
	source = id->state == SOFT_CM_BOUND ? &addresses->src_addr : NULL;
	if (source && source->sa_family != destination->sa_family)
		return EINVAL;
	set_destination(id, destination);
	error = find_source(&addresses->dst_addr, source, &local);
	if (!error && !id->bound)
		error = soft_cm_device_error((struct sockaddr *)&local);
	if (error)
		return error;
	if (id->state == SOFT_CM_IDLE) {
		error = soft_cm_bind(id, (struct sockaddr *)&local);
		if (error)
			return error;
	} else if (soft_cm_is_any(&addresses->src_addr)) { /* keep only the port */
		*port_in((struct sockaddr *)&local) = port_of(&addresses->src_addr);
		memcpy(&addresses->src_storage, &local, sizeof(local));
	}
	if (!id->bound)
		soft_cm_device_bind(id);
	fill_gids(id);
	error = soft_cm_report(id, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL);
	if (!error)
		id->state = SOFT_CM_ADDR_RESOLVED;
	return error;
}

/* Resolve the destination address. If the route or the source address is missing, the call itself
 * fails, as with the kernel's rdma_cm. If the host is unreachable, only rdma_connect(3) fails. */
int soft_rdma_resolve_addr(struct rdma_cm_id *application, struct sockaddr *src_addr,
			   struct sockaddr *dst_addr, int timeout_ms)
{
	struct soft_cm_id *id;

	(void)timeout_ms; /* resolving never blocks */
	if (!soft_cm_address_length(dst_addr) || (src_addr && !soft_cm_address_length(src_addr)))
		return soft_cm_fail(EINVAL);
	id = soft_cm_enter_device(application);
	if (!id || soft_cm_leave_device(resolve(id, src_addr, dst_addr)))
		return -1;
	return soft_cm_wait_if_synchronous(id);
}

/* Report that the route is resolved. There is nothing to look up and no timeout, because the device
 * uses the host's IP routes. */
int soft_rdma_resolve_route(struct rdma_cm_id *application, int timeout_ms)
{
	struct soft_cm_id *id = soft_cm_enter(application);
	int error;

	(void)timeout_ms;
	if (!id)
		return -1;
	error = soft_cm_allowed(id->state, SOFT_CM_CALL_RESOLVE_ROUTE);
	if (!error)
		error = soft_cm_report(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL);
	if (!error)
		id->state = SOFT_CM_ROUTE_RESOLVED;
	return soft_cm_leave(error) ? -1 : soft_cm_wait_if_synchronous(id);
}

/* ---- addresses of a connected socket ------------------------------------------------------ */

static void unmap_ipv4(struct sockaddr_storage *address)
{
	struct sockaddr_in6 mapped;
	struct sockaddr_in ipv4 = {.sin_family = AF_INET};

	memcpy(&mapped, address, sizeof(mapped));
	if (mapped.sin6_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&mapped.sin6_addr))
		return;
	ipv4.sin_port = mapped.sin6_port;
	memcpy(&ipv4.sin_addr, mapped.sin6_addr.s6_addr + 12, 4);
	memset(address, 0, sizeof(*address));
	memcpy(address, &ipv4, sizeof(ipv4));
}

void soft_cm_update_addresses(struct soft_cm_id *id)
{
	struct rdma_addr *addresses = &id->id.route.addr;

	id->link->carrier->get_addresses(id->link, &addresses->src_storage,
					 &addresses->dst_storage);
	unmap_ipv4(&addresses->src_storage);
	unmap_ipv4(&addresses->dst_storage);
	fill_gids(id);
}

/* Returns the source port in network byte order. The manual page does not specify the byte order,
 * but librdmacm uses this one. */
uint16_t soft_rdma_get_src_port(struct rdma_cm_id *id)
{
	return id ? port_of(&id->route.addr.src_addr) : 0;
}

uint16_t soft_rdma_get_dst_port(struct rdma_cm_id *id)
{
	return id ? port_of(&id->route.addr.dst_addr) : 0;
}
