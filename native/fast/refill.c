/* Receives that are posted again, and the credits that go to and fro for them: what is plain of it.
 *
 * The rules stand in aiordma/_transport/receives.py and aiordma/_core/credits.py.  Plain is it while
 * the receives keep their size, and there are cached blocks for them while no task waits for memory.
 */
#include "traffic.h"

static PyObject *str_credits;

bool fast_receives_are_plain(const struct traffic *traffic)
{
	return traffic->started && !traffic->ended && traffic->receive_size &&
	       traffic->used < traffic->patience;
}

int fast_send_credits(struct traffic *traffic)
{
	struct queue *queue = (struct queue *)traffic->queue;
	struct block *block = NULL;
	unsigned int control, data;

	if (queue->free && !queue->failed)
		block = fast_take_block((struct shelf *)traffic->shelf, FRAME_HEADER);
	if (!block)
		return PyErr_Occurred() ? -1 : fast_call((PyObject *)traffic, str_credits, NULL);
	struct frame *frame = fast_new_frame(block, FRAME_HEADER, 0);
	unsigned char *bytes = fast_block_bytes(block);

	Py_DECREF((PyObject *)block);
	if (!frame)
		return -1;
	fast_spend_control((struct account *)traffic->account, &control, &data);
	fast_put_header(bytes, FRAME_CREDIT, control, data, 0);
	int rc = fast_post_counted(traffic, frame);

	Py_DECREF((PyObject *)frame);
	return rc;
}

int fast_took_control(struct traffic *traffic, struct block *block, uint32_t length,
		      unsigned int control, unsigned int data)
{
	uint32_t size = traffic->receive_size;

	if (!fast_receives_are_plain(traffic) || block->size < size ||
	    !fast_received_control((struct account *)traffic->account, control, data))
		return 0;
	traffic->reposted++;
	if (fast_count_used(traffic, block, length) ||
	    fast_post_receive((struct queue *)traffic->queue, block, size))
		return -1;
	return 1;
}

int fast_refill(struct traffic *traffic, unsigned int *taken)
{
	struct account *account = (struct account *)traffic->account;

	if (!fast_receives_are_plain(traffic) || *taken > account->held_data)
		return 0;
	unsigned int count =
		fast_post_ready((struct queue *)traffic->queue, (struct shelf *)traffic->shelf,
				*taken, traffic->receive_size);

	*taken -= count;
	traffic->reposted += count;
	fast_reposted_data(account, count);
	return *taken ? 0 : fast_pump(traffic);
}

int fast_add_refill(void)
{
	str_credits = PyUnicode_InternFromString("_send_credits");
	return str_credits ? 0 : -1;
}
