/* The contents of the device's files in /sys, generated from its calls. */
#include "preload.h"

#include <errno.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "objects/objects.h"

static int print_text(char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int print_text(char *text, const char *format, ...)
{
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(text, TEXT_SIZE, format, arguments);
	va_end(arguments);
	return length < TEXT_SIZE ? length : -EOVERFLOW;
}

/* Begin the definition of the function that writes the text of a file in /sys (`answer` in
 * preload.h). The file belongs to device `number` and has no `index`. */
#define SYSFS_TEXT(name)                                                                           \
	int answer_##name(char *text, int number __attribute__((unused)),                          \
			  unsigned int index __attribute__((unused)))

/* Define the function of a file that has the same text for every device. */
#define CONSTANT_SYSFS_TEXT(name, value)                                                           \
	SYSFS_TEXT(name)                                                                           \
	{                                                                                          \
		return print_text(text, "%s\n", value);                                            \
	}

CONSTANT_SYSFS_TEXT(verbs_abi, "6")
CONSTANT_SYSFS_TEXT(driver_abi, "1")
CONSTANT_SYSFS_TEXT(hca_type, "aiordma")
CONSTANT_SYSFS_TEXT(node_type, "1: CA")
CONSTANT_SYSFS_TEXT(link_layer, "Ethernet")
/* active_width and active_speed of ibv_query_port(3) */
CONSTANT_SYSFS_TEXT(rate, "200 Gb/sec (4X HDR)")
CONSTANT_SYSFS_TEXT(pkey, "0xffff")
CONSTANT_SYSFS_TEXT(zero, "0")
CONSTANT_SYSFS_TEXT(zero_hex, "0x0")
CONSTANT_SYSFS_TEXT(numa_node, "-1") /* no NUMA node */

SYSFS_TEXT(node_number)
{
	return print_text(text, "%d:%d\n", NODE_MAJOR, NODE_MINOR + number);
}

SYSFS_TEXT(name)
{
	return print_text(text, "embedded%d\n", number);
}

_Static_assert(CM_MINOR == NODE_MINOR + SOFT_MAX_HCAS, "each device has a node");

int preload_devices(void)
{
	soft_lock();
	int count = soft_hca_count();

	soft_unlock();
	return count;
}

/* ---- the device ------------------------------------------------------------------------------ */

/* Returns a device. It stays valid after the lock is released, because devices are never freed. */
static struct soft_hca *hca_at(int number)
{
	soft_lock();
	struct soft_hca *hca = soft_hca_at(number);

	soft_unlock();
	return hca;
}

static void query_device(int number, struct ibv_device_attr *attr)
{
	/* The device need not be open, because the attributes are the same for every context. */
	struct ibv_context closed_context = {.device = &hca_at(number)->device};

	soft_ibv_query_device(&closed_context, attr);
}

SYSFS_TEXT(fw_ver)
{
	struct ibv_device_attr attr;

	query_device(number, &attr);
	return print_text(text, "%s\n", attr.fw_ver);
}

SYSFS_TEXT(guid)
{
	struct ibv_device_attr attr;
	uint8_t raw[8];

	query_device(number, &attr);
	memcpy(raw, &attr.node_guid, sizeof(raw));
	return print_text(text, "%02x%02x:%02x%02x:%02x%02x:%02x%02x\n", raw[0], raw[1], raw[2],
			  raw[3], raw[4], raw[5], raw[6], raw[7]);
}

/* ---- processors: all of them ----------------------------------------------------------------- */

SYSFS_TEXT(cpu_list)
{
	long count = sysconf(_SC_NPROCESSORS_CONF);

	return count > 1 ? print_text(text, "0-%ld\n", count - 1) : print_text(text, "0\n");
}

/* Write the bit mask of all processors like the kernel, as words of 32 bits, highest first. */
SYSFS_TEXT(cpu_mask)
{
	long count = sysconf(_SC_NPROCESSORS_CONF);
	int length = 0;

	for (long word = (count - 1) / 32; word >= 0 && length < TEXT_SIZE - 16; word--) {
		long here = count - word * 32;
		uint32_t mask = here >= 32 ? UINT32_MAX : ((uint32_t)1 << here) - 1;

		length += sprintf(text + length, "%08x%s", mask, word ? "," : "\n");
	}
	return length;
}

/* ---- the port -------------------------------------------------------------------------------- */

SYSFS_TEXT(lid)
{
	return print_text(text, "0x%x\n", soft_links->lid(hca_at(number)));
}

static bool is_down(int number)
{
	bool down;

	soft_lock();
	down = soft_ports_down & soft_hca_at(number)->port_bit;
	soft_unlock();
	return down;
}

SYSFS_TEXT(state)
{
	return print_text(text, "%s\n", is_down(number) ? "1: DOWN" : "4: ACTIVE");
}

SYSFS_TEXT(phys_state)
{
	return print_text(text, "%s\n", is_down(number) ? "3: Disabled" : "5: LinkUp");
}

SYSFS_TEXT(cap_mask)
{
	return print_text(text, "0x%08x\n", IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS);
}

/* Get an entry of the GID table. If no context is open, read the table just for this call. Returns
 * EINVAL if the entry is empty or beyond the end of the table. */
static int find_gid(int number, unsigned int index, struct soft_gid *gid)
{
	struct soft_hca *hca = hca_at(number);
	bool closed;
	int rc;

	soft_lock();
	closed = hca->gid_count == 0;
	if (closed)
		soft_gid_refresh(hca);
	rc = soft_gid_at(hca, (int)index, gid);
	if (closed)
		soft_gid_clear(hca);
	soft_unlock();
	return rc;
}

/* Write the address of a GID table entry. Like the kernel, show an empty entry as zeros. */
int answer_gid(char *text, int number, unsigned int index)
{
	struct soft_gid entry;
	uint8_t *raw = entry.gid.raw;

	if (find_gid(number, index, &entry))
		memset(&entry, 0, sizeof(entry));
	for (int i = 0; i < 16; i += 2)
		sprintf(text + i / 2 * 5, "%02x%02x%s", raw[i], raw[i + 1], i < 14 ? ":" : "\n");
	return 40;
}

/* Write the type of a GID table entry. Like the kernel, return EINVAL if the entry is empty. */
int answer_gid_type(char *text, int number, unsigned int index)
{
	struct soft_gid entry;

	return find_gid(number, index, &entry) ? -EINVAL : print_text(text, "RoCE v2\n");
}

/* Write the network interface of a GID table entry. */
int answer_gid_ndev(char *text, int number, unsigned int index)
{
	struct soft_gid entry;
	char name[IF_NAMESIZE];

	if (find_gid(number, index, &entry) || !if_indextoname(entry.ifindex, name))
		return -EINVAL;
	return print_text(text, "%s\n", name);
}
