/* Queue pair numbers: the upper bits identify the process, and the lower bits the queue pair.
 *
 * RoCE identifies a queue pair by its GID and number. The GID identifies the host. The upper 10
 * bits of the number encode the process's network port, for which there are 1,000 choices
 * (listener.c). The lower 14 bits are random.
 *
 * A number is not reused until many others have been released. Late packets, and applications that
 * still have an old address, therefore do not reach another queue pair.
 */

#include "objects.h"

enum { LOCAL_NUMBERS = 1 << SOFT_QPN_LOCAL_BITS };

/* In the worst case, about SOFT_QPN_QUARANTINE numbers are still assignable. Random selection
 * therefore finds one quickly. */
_Static_assert(SOFT_MAX_QP + 2 * SOFT_QPN_QUARANTINE <= LOCAL_NUMBERS, "numbers run out");

struct soft_qp *soft_qp_find(uint32_t qp_num)
{
	soft_assert_locked();
	return soft_table_find(&soft_device.objects->qps, qp_num);
}

/* Returns whether `number` may be assigned. Numbers 0 and 1 are special queue pairs (IBTA 3.5.10),
 * and recently released numbers must not be reused yet. */
static bool is_assignable(uint32_t number)
{
	if (number < 2 || soft_table_find(&soft_device.objects->qps, number))
		return false;
	for (unsigned i = 0; i < SOFT_QPN_QUARANTINE; i++)
		if (soft_device.objects->quarantined_qpns[i] == number)
			return false;
	return true;
}

int soft_qp_number_assign(struct soft_qp *qp)
{
	soft_assert_locked();
	uint16_t port = soft_ip_port();
	uint32_t number;

	if (!port)
		return errno;
	if (soft_device.objects->qps.count >= SOFT_MAX_QP)
		return ENOMEM;
	do {
		if (soft_device.platform->random(&number, sizeof(number), 0) != sizeof(number))
			return errno;
		number &= LOCAL_NUMBERS - 1;
		number |= (uint32_t)(port - SOFT_IP_PORT_FIRST) << SOFT_QPN_LOCAL_BITS;
	} while (!is_assignable(number));
	qp->ibv.qp_num = number;
	return soft_table_put(&soft_device.objects->qps, number, qp);
}

/* Release the number, but do not assign it again until many others have been released. */
void soft_qp_number_release(uint32_t number)
{
	soft_assert_locked();
	struct soft_objects *objects = soft_device.objects;

	soft_table_remove(&objects->qps, number);
	objects->quarantined_qpns[objects->quarantined_count++ % SOFT_QPN_QUARANTINE] = number;
}
