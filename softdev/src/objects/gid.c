/* GID tables, which contain the addresses that queue pairs on this host can use.
 *
 * As on RoCE v2, a GID is an IP address (IPv4 as ::ffff:a.b.c.d). A table begins with the addresses
 * of the widest scope, in the kernel's order, because many programs use the first GID. Link-local
 * addresses follow. They require an interface, which a GID does not contain, so packets to a
 * link-local address are sent on the interface of the source GID. Loopback addresses come last.
 * Cards do not have them, but this device needs them on hosts without a network. Entries never move
 * while the device is in use. An address added later takes an empty entry or is appended.
 *
 * If this process has several devices, the first one has the host's addresses. Each other device
 * has only a loopback address (127.0.0.2, 127.0.0.3 and so on), which Linux provides without
 * configuration. A device that is assigned to a network interface has the addresses of that
 * interface, even while it is down. In that case, the first device also has the loopback addresses.
 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "objects.h"

static const union ibv_gid empty;

static bool is_empty(const struct soft_hca *hca, int index)
{
	return !memcmp(&hca->gids[index].gid, &empty, sizeof(empty));
}

const union ibv_gid soft_gid_loopback = {
	.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1},
};

bool soft_gid_is_ipv4(const union ibv_gid *gid)
{
	return !memcmp(gid->raw, soft_gid_loopback.raw, 12);
}

static bool is_ipv4_loopback(const union ibv_gid *gid)
{
	return !memcmp(gid->raw, soft_gid_loopback.raw, 13);
}

bool soft_gid_is_loopback(const union ibv_gid *gid)
{
	return is_ipv4_loopback(gid) || !memcmp(gid, &in6addr_loopback, sizeof(*gid));
}

/* Returns the GID of an IPv4 address, which is the IPv4-mapped IPv6 address (IBTA annex A17). */
union ibv_gid soft_gid_of_ipv4(const void *address)
{
	union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};

	memcpy(&gid.raw[12], address, 4);
	return gid;
}

bool soft_gid_from_sockaddr(union ibv_gid *gid, const struct sockaddr *address)
{
	memset(gid, 0, sizeof(*gid));
	if (address->sa_family == AF_INET)
		*gid = soft_gid_of_ipv4(
			&((const struct sockaddr_in *)(const void *)address)->sin_addr);
	else if (address->sa_family == AF_INET6)
		memcpy(gid->raw, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr,
		       16);
	return address->sa_family == AF_INET || address->sa_family == AF_INET6;
}

static int find_gid(const struct soft_gid *entries, int count, const union ibv_gid *gid)
{
	for (int i = 0; i < count; i++)
		if (!memcmp(&entries[i].gid, gid, sizeof(*gid)))
			return i;
	return -1;
}

/* Returns the index of the first entry with this GID, or -1. Searching for `empty` finds an entry
 * that can be reused. */
static int index_of(const struct soft_hca *hca, const union ibv_gid *gid)
{
	return find_gid(hca->gids, hca->gid_count, gid);
}

/* Returns the number of the device that has `gid` as its loopback address, or -1. */
static int loopback_number(const union ibv_gid *gid)
{
	int last = gid->raw[15];

	return !memcmp(gid->raw, soft_gid_loopback.raw, 15) && last <= SOFT_MAX_HCAS ? last - 1
										     : -1;
}

/* Search the GID tables of the first `count` devices for `gid`. Returns the number of the first
 * device that has it, or `count` if none does. */
static int first_hca_with(const union ibv_gid *gid, int count)
{
	int number = 0;

	while (number < count && soft_gid_index(soft_hca_at(number), gid) < 0)
		number++;
	return number;
}

int soft_gid_hca_number(const union ibv_gid *gid)
{
	const int count = soft_hca_count();
	int number = loopback_number(gid);

	if (number < 0)
		number = first_hca_with(gid, count) % count; /* 0 if no device has it */
	return number;
}

const struct soft_hca *soft_gid_hca(const union ibv_gid *gid)
{
	return soft_hca_at(soft_gid_hca_number(gid));
}

uint32_t soft_gid_port_bit(const union ibv_gid *gid)
{
	return soft_gid_hca(gid)->port_bit;
}

bool soft_gid_is_multicast(const union ibv_gid *gid)
{
	return gid->raw[0] == 0xff || (soft_gid_is_ipv4(gid) && (gid->raw[12] & 0xf0) == 0xe0);
}

bool soft_datagram_is_ipv4(const struct soft_datagram *datagram)
{
	return soft_gid_is_ipv4(&datagram->source) && soft_gid_is_ipv4(&datagram->destination);
}

/* Address scopes, in the order of their addresses in a GID table. */
enum scope { SCOPE_GLOBAL, SCOPE_LINK, SCOPE_HOST };

static enum scope scope_of(const union ibv_gid *gid)
{
	if (soft_gid_is_loopback(gid))
		return SCOPE_HOST;
	/* RFC 4291, 2.5.6 */
	return gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80 ? SCOPE_LINK : SCOPE_GLOBAL;
}

/* Returns whether the device uses the interface's addresses. The first device has the addresses of
 * all interfaces if it is not bound to one, and otherwise those of its interface and loopback. */
static bool has_interface(const struct soft_hca *hca, const struct ifaddrs *ifa)
{
	const bool first = hca == soft_hca_at(0);
	const size_t length = strcspn(ifa->ifa_name, ":"); /* an address label follows the colon */

	if (!hca->interface[0])
		return first && ifa->ifa_flags & IFF_UP;
	return (first && ifa->ifa_flags & IFF_LOOPBACK) ||
	       (length == strlen(hca->interface) && !memcmp(ifa->ifa_name, hca->interface, length));
}

/* Store the index and MTU of an interface. They stay 0 if the interface no longer exists or the
 * query socket cannot be created. */
static void read_interface(struct soft_gid *gid, const struct ifaddrs *ifa)
{
	struct ifreq request = {0};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	strncpy(request.ifr_name, ifa->ifa_name, sizeof(request.ifr_name) - 1);
	if (!ioctl(fd, SIOCGIFINDEX, &request))
		gid->ifindex = (uint32_t)request.ifr_ifindex;
	if (gid->ifindex && !ioctl(fd, SIOCGIFMTU, &request))
		gid->mtu = request.ifr_mtu;
	soft_close_fd(&fd);
}

/* Append the interface addresses that have this scope, but leave room for `reserved` entries. Skip
 * the loopback GIDs of the devices, which loopback_entry() adds, and addresses of earlier devices.
 * Returns the new count. */
static int add_addresses(const struct soft_hca *hca, const struct ifaddrs *ifa, enum scope scope,
			 struct soft_gid *fresh, int count, int reserved)
{
	const int hca_number = soft_hca_number(hca);

	for (; ifa && count < SOFT_GIDS - reserved; ifa = ifa->ifa_next) {
		union ibv_gid gid;

		if (ifa->ifa_addr && soft_gid_from_sockaddr(&gid, ifa->ifa_addr) &&
		    scope_of(&gid) == scope && has_interface(hca, ifa) &&
		    loopback_number(&gid) < 0 && first_hca_with(&gid, hca_number) == hca_number &&
		    find_gid(fresh, count, &gid) < 0) {
			fresh[count] = (struct soft_gid){.gid = gid};
			read_interface(&fresh[count++], ifa);
		}
	}
	return count;
}

union ibv_gid soft_gid_loopback_of(const struct soft_hca *hca)
{
	union ibv_gid gid = soft_gid_loopback;

	gid.raw[15] += (uint8_t)soft_hca_number(hca);
	return gid;
}

int soft_gid_loopback_index(const struct soft_hca *hca)
{
	const union ibv_gid gid = soft_gid_loopback_of(hca);

	return index_of(hca, &gid);
}

/* Returns the table entry for the device's loopback address. If the loopback interface is up, the
 * entry contains its index and MTU. */
static struct soft_gid loopback_entry(const struct soft_hca *hca, const struct ifaddrs *ifa)
{
	struct soft_gid entry = {.gid = soft_gid_loopback_of(hca)};
	union ibv_gid gid;

	for (; ifa; ifa = ifa->ifa_next)
		if (ifa->ifa_addr && ifa->ifa_flags & IFF_UP &&
		    soft_gid_from_sockaddr(&gid, ifa->ifa_addr) &&
		    !memcmp(&gid, &soft_gid_loopback, sizeof(gid)))
			read_interface(&entry, ifa);
	return entry;
}

/* Store the GIDs of the device's current addresses in `fresh`. Returns their number. */
static int read_addresses(const struct soft_hca *hca, struct soft_gid *fresh)
{
	enum { LOOPBACK_ENTRIES = 1 };
	struct ifaddrs *addresses = NULL;
	int count = 0;

	if (soft_device.platform->network) { /* a simulated network */
		const int hca_number = soft_hca_number(hca);

		fresh[0] = (struct soft_gid){
			.gid = soft_device.platform->network->address(hca_number)};
		fresh[1] = loopback_entry(hca, NULL);
		return 2;
	}
	/* If the addresses cannot be read, the loopback address still works. */
	if (getifaddrs(&addresses))
		addresses = NULL;
	for (enum scope scope = SCOPE_GLOBAL; scope < SCOPE_HOST; scope++)
		count = add_addresses(hca, addresses, scope, fresh, count, LOOPBACK_ENTRIES);
	fresh[count++] = loopback_entry(hca, addresses);
	count = add_addresses(hca, addresses, SCOPE_HOST, fresh, count, 0);
	freeifaddrs(addresses);
	return count;
}

/* Update the table in place, as the kernel updates its GID tables. An address keeps its index as
 * long as it exists. A removed address leaves an empty entry, which a new address can reuse. */
bool soft_gid_refresh(struct soft_hca *hca)
{
	struct soft_gid fresh[SOFT_GIDS];
	int count = read_addresses(hca, fresh);
	bool changed = false;

	for (int i = 0; i < hca->gid_count; i++)
		if (!is_empty(hca, i) && find_gid(fresh, count, &hca->gids[i].gid) < 0) {
			hca->gids[i] = (struct soft_gid){0};
			changed = true;
		}
	for (int i = 0; i < count; i++) {
		int at = index_of(hca, &fresh[i].gid);

		if (at < 0) {
			at = index_of(hca, &empty);
			changed = true;
		}
		if (at < 0 && hca->gid_count < SOFT_GIDS)
			at = hca->gid_count++;
		if (at >= 0)
			hca->gids[at] = fresh[i];
	}
	while (is_empty(hca, hca->gid_count - 1)) /* ends at the loopback entry */
		hca->gid_count--;
	return changed;
}

void soft_gid_clear(struct soft_hca *hca)
{
	memset(hca->gids, 0, sizeof(hca->gids));
	hca->gid_count = 0;
}

int soft_gid_at(const struct soft_hca *hca, int index, struct soft_gid *gid)
{
	if (index < 0 || index >= hca->gid_count || is_empty(hca, index))
		return EINVAL;
	*gid = hca->gids[index];
	return 0;
}

int soft_gid_bind(int fd, const union ibv_gid *own)
{
	struct sockaddr_storage address;
	const socklen_t size = soft_gid_to_sockaddr(own, own, 0, &address);

	/* Let connect() choose the port, so that connections to different destinations can share it
	 * (ip(7)). */
	soft_set_option(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
	return bind(fd, (struct sockaddr *)&address, size) ? errno : 0;
}

/* Returns whether the packets of a socket connected to `to` stay on this host. If they do, the
 * socket's source address is either `to` or a loopback address. */
static bool stays_on_host(int fd, const union ibv_gid *to)
{
	struct sockaddr_storage address;
	socklen_t size = sizeof(address);
	union ibv_gid own;

	return !getsockname(fd, (struct sockaddr *)&address, &size) &&
	       soft_gid_from_sockaddr(&own, (struct sockaddr *)&address) &&
	       (soft_gid_is_loopback(&own) || !memcmp(&own, to, sizeof(own)));
}

static int find_simulated_route(const union ibv_gid *own, const union ibv_gid *to)
{
	const int number = soft_device.platform->network->device_to(to);

	return !soft_gid_is_loopback(own) && number == soft_gid_hca_number(own) ? 0 : ENETUNREACH;
}

/* Query the host's routing table by connecting a UDP socket, which sends nothing. Linux rejects a
 * route from 127.0.0.0/8 to another host with EINVAL. From ::1, it accepts the route but drops the
 * packets. Therefore, the socket is not bound to ::1, and the chosen route must stay on this host.
 * Returns 0 or an errno value. */
static int find_route(const union ibv_gid *own, const union ibv_gid *to)
{
	const bool from_ipv6_loopback = !soft_gid_is_ipv4(own) && soft_gid_is_loopback(own);
	struct sockaddr_storage address;
	socklen_t size = soft_gid_to_sockaddr(to, own, SOFT_IP_PORT_FIRST, &address);
	int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), rc;

	if (fd < 0)
		return 0; /* assume a route; without one, requests will fail */
	rc = from_ipv6_loopback ? 0 : soft_gid_bind(fd, own);
	if (!rc && connect(fd, (struct sockaddr *)&address, size))
		rc = errno == EINVAL ? ENETUNREACH : errno;
	if (!rc && from_ipv6_loopback && !stays_on_host(fd, to))
		rc = ENETUNREACH;
	close(fd);
	/* These errors only mean that no port is free to query the route with. */
	return rc == EADDRINUSE || rc == EAGAIN ? 0 : rc;
}

int soft_gid_route(const union ibv_gid *own, const union ibv_gid *to)
{
	if (soft_gid_is_on_this_host(to) || soft_gid_is_multicast(to))
		return 0;
	return soft_device.platform->network ? find_simulated_route(own, to) : find_route(own, to);
}

int soft_gid_source(const struct soft_hca *hca, int index, const union ibv_gid *to,
		    struct soft_gid *gid)
{
	if (soft_gid_at(hca, index, gid))
		return EINVAL;
	if (soft_gid_is_multicast(to))
		return 0; /* sent over IPv4 in any case */
	if (soft_gid_is_ipv4(&gid->gid) != soft_gid_is_ipv4(to))
		return EINVAL;
	return soft_gid_route(&gid->gid, to);
}

int soft_gid_index(const struct soft_hca *hca, const union ibv_gid *gid)
{
	int index = index_of(hca, gid);

	return index >= 0 && !is_empty(hca, index) ? index : -1;
}

bool soft_gid_is_local(const union ibv_gid *gid)
{
	return soft_gid_index(soft_gid_hca(gid), gid) >= 0;
}

bool soft_gid_is_on_this_host(const union ibv_gid *gid)
{
	return is_ipv4_loopback(gid) || soft_gid_is_local(gid);
}

uint32_t soft_gid_scope_id(const union ibv_gid *gid, const union ibv_gid *own)
{
	const struct soft_hca *hca = soft_gid_hca(own);
	int index = scope_of(gid) == SCOPE_LINK ? index_of(hca, own) : -1;

	return index < 0 ? 0 : hca->gids[index].ifindex;
}

socklen_t soft_gid_to_sockaddr(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			       struct sockaddr_storage *address)
{
	struct sockaddr_in6 *in6 = (void *)address;
	struct sockaddr_in *in = (void *)address;

	memset(address, 0, sizeof(*address));
	if (soft_gid_is_ipv4(gid)) {
		in->sin_family = AF_INET;
		in->sin_port = htons(port);
		memcpy(&in->sin_addr, &gid->raw[12], 4);
		return sizeof(*in);
	}
	in6->sin6_family = AF_INET6;
	in6->sin6_port = htons(port);
	memcpy(&in6->sin6_addr, gid->raw, 16);
	in6->sin6_scope_id = soft_gid_scope_id(gid, own);
	return sizeof(*in6);
}

/* ---- calls --------------------------------------------------------------------------------- */

/* Query a GID. The GID of an empty entry is all zeros. Returns 0, or -1 with errno set. */
int soft_ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid)
{
	const struct soft_hca *hca = soft_hca_of(context);

	soft_lock();
	bool found = port_num == 1 && index >= 0 && index < hca->gid_count;

	if (found)
		*gid = hca->gids[index].gid;
	soft_unlock();
	if (!found) {
		errno = EINVAL;
		return -1;
	}
	return 0;
}

static void fill_entry(struct ibv_gid_entry *entry, size_t entry_size, const struct soft_hca *hca,
		       int index)
{
	struct ibv_gid_entry full = {
		.gid = hca->gids[index].gid,
		.gid_index = (uint32_t)index,
		.port_num = 1,
		.gid_type = IBV_GID_TYPE_ROCE_V2,
		.ndev_ifindex = hca->gids[index].ifindex,
	};

	memcpy(entry, &full, entry_size < sizeof(full) ? entry_size : sizeof(full));
}

/* Query a GID table entry (ibv_query_gid_ex(3)). `flags` is reserved and must be 0. Returns 0,
 * EINVAL, or ENODATA for an empty entry. */
int soft__ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
			   struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)
{
	const struct soft_hca *hca = soft_hca_of(context);
	int rc = 0;

	soft_lock();
	if (port_num != 1 || flags || gid_index >= (uint32_t)hca->gid_count)
		rc = EINVAL;
	else if (is_empty(hca, (int)gid_index))
		rc = ENODATA;
	else
		fill_entry(entry, entry_size, hca, (int)gid_index);
	soft_unlock();
	return rc;
}

/* Store the used entries of the GID table (ibv_query_gid_table(3)). `entry_size` is the size of the
 * caller's struct, which may be an older and shorter one. Returns the number of entries, or -EINVAL
 * if `flags` is set or the entries do not fit. */
ssize_t soft__ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
				  size_t max_entries, uint32_t flags, size_t entry_size)
{
	const struct soft_hca *hca = soft_hca_of(context);
	ssize_t count = flags ? -EINVAL : 0;

	soft_lock();
	for (int i = 0; i < hca->gid_count && count >= 0; i++) {
		if (is_empty(hca, i))
			continue;
		if ((size_t)count == max_entries)
			count = -EINVAL;
		else
			fill_entry((void *)((char *)entries + (size_t)count++ * entry_size),
				   entry_size, hca, i);
	}
	soft_unlock();
	return count;
}

int soft_ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, uint16_t *pkey)
{
	(void)context;
	if (port_num != 1 || index != 0) {
		errno = EINVAL;
		return -1;
	}
	*pkey = 0xffff; /* the default partition, full member (IBTA 10.9.1.2) */
	return 0;
}
