/* Messages that are too long for a frame: the two control messages that each of them costs, in msgpack.
 *
 * The format stands in aiordma/_core/protocol.py, whose words are written here byte by byte as msgpack
 * does it.  What comes in is read here as long as it is just that; whatever else it may be, other forms
 * of the same numbers included, is for Python to read, or to find fault with.
 */
#include <string.h>

#include "fetch.h"

enum {
	RENDEZVOUS = 1,
	RENDEZVOUS_DONE = 2,
	RESERVE = 2, /* aiordma/_core/credits.py */
	LONGEST = 64,
	FIXED_ARRAY = 0x90,
	NIL = 0xc0,
	UINT8 = 0xcc, /* and then 16, 32 and 64 bits */
};

/* An array of five, of which the first is the magic number, the second the version; the type comes. */
static const unsigned char envelope[] = {FIXED_ARRAY | 5, UINT8 + 1, 0xa1, 0x7d, 1};

/* ---- numbers ----------------------------------------------------------------------------------- */

static unsigned char *put(unsigned char *to, uint64_t number)
{
	int size = number >> 32 ? 3 : number >> 16 ? 2 : number >> 8 ? 1 : 0;

	if (number < 0x80) {
		*to = (unsigned char)number;
		return to + 1;
	}
	*to++ = (unsigned char)(UINT8 + size);
	for (int shift = 8 << size; shift;)
		*to++ = (unsigned char)(number >> (shift -= 8));
	return to;
}

/* What is left, and NULL as soon as anything in it is not as expected. */
struct rest {
	const unsigned char *bytes;
	uint32_t length;
};

static unsigned char get_byte(struct rest *rest)
{
	if (!rest->bytes || !rest->length) {
		rest->bytes = NULL;
		return 0;
	}
	rest->length--;
	return *rest->bytes++;
}

static void expect(struct rest *rest, unsigned char byte)
{
	if (get_byte(rest) != byte)
		rest->bytes = NULL;
}

/* A number that begins with this byte, of no more than so many bits. */
static uint64_t get_from(struct rest *rest, unsigned char first, unsigned bits)
{
	uint64_t number = 0;

	if (first < 0x80)
		return first;
	if (first < UINT8 || first > UINT8 + 3) {
		rest->bytes = NULL;
		return 0;
	}
	for (int left = 1 << (first - UINT8); left; left--)
		number = number << 8 | get_byte(rest);
	if (bits < 64 && number >> bits)
		rest->bytes = NULL;
	return number;
}

static uint64_t get(struct rest *rest, unsigned bits)
{
	return get_from(rest, get_byte(rest), bits);
}

/* ---- messages ---------------------------------------------------------------------------------- */

static unsigned char *put_envelope(unsigned char *to, unsigned char type, uint64_t request_id,
				   unsigned char fields)
{
	memcpy(to, envelope, sizeof(envelope));
	to[sizeof(envelope)] = type;
	to = put(to + sizeof(envelope) + 1, request_id);
	*to++ = FIXED_ARRAY | fields;
	return to;
}

static uint64_t get_envelope(struct rest *rest, unsigned char type, unsigned char fields)
{
	for (size_t i = 0; i < sizeof(envelope); i++)
		expect(rest, envelope[i]);
	expect(rest, type);
	uint64_t request_id = get(rest, 32);

	expect(rest, FIXED_ARRAY | fields);
	return request_id;
}

static bool whole(const struct rest *rest)
{
	return rest->bytes && !rest->length;
}

static struct rest content(const struct block *block, uint32_t length)
{
	return (struct rest){fast_block_bytes(block) + FRAME_HEADER, length - FRAME_HEADER};
}

static bool get_offer(struct rest rest, struct offer *offer)
{
	offer->request_id = get_envelope(&rest, RENDEZVOUS, 4);
	offer->address = get(&rest, 64);
	offer->rkey = get(&rest, 32);
	offer->length = get(&rest, 64);
	unsigned char first = get_byte(&rest);

	offer->has_imm = first != NIL;
	offer->imm = offer->has_imm ? get_from(&rest, first, 32) : 0;
	return whole(&rest) && offer->length && offer->length - 1 <= UINT64_MAX - offer->address;
}

/* ---- the sender -------------------------------------------------------------------------------- */

int fast_send_offer(struct traffic *traffic, struct block *block, const struct offer *offer)
{
	unsigned char *bytes = fast_block_bytes(block);
	unsigned char *end = put_envelope(bytes + FRAME_HEADER, RENDEZVOUS, offer->request_id, 4);
	unsigned int control, data;

	end = put(put(put(end, offer->address), offer->rkey), offer->length);
	if (offer->has_imm)
		end = put(end, offer->imm);
	else
		*end++ = NIL;
	struct frame *frame = fast_new_frame(block, (uint32_t)(end - bytes), 0);

	if (!frame)
		return -1;
	fast_spend_data((struct account *)traffic->account, &control, &data);
	fast_put_header(bytes, FRAME_OFFER, control, data, 0);
	int rc = fast_post_messages(traffic, frame);

	Py_DECREF((PyObject *)frame);
	return rc;
}

PyObject *fast_post_offer(PyObject *self, PyObject *args)
{
	struct traffic *traffic = (struct traffic *)self;
	unsigned long long address, length;
	unsigned int request_id, rkey, imm = 0;
	PyObject *block, *imm_or_none;

	if (!PyArg_ParseTuple(args, "O!IKIKO", fast_block_type, &block, &request_id, &address,
			      &rkey, &length, &imm_or_none))
		return NULL;
	if (imm_or_none != Py_None)
		imm = (unsigned int)PyLong_AsUnsignedLong(imm_or_none);
	if (PyErr_Occurred())
		return NULL;
	if (((struct block *)block)->size < OFFER_ROOM ||
	    !((struct account *)traffic->account)->data) {
		PyErr_SetString(PyExc_ValueError, "an offer needs a block and a credit");
		return NULL;
	}
	const struct offer offer = {
		.request_id = request_id,
		.address = address,
		.rkey = rkey,
		.length = length,
		.imm = imm,
		.has_imm = imm_or_none != Py_None,
	};

	if (fast_send_offer(traffic, (struct block *)block, &offer))
		return NULL;
	Py_RETURN_NONE;
}

int fast_took_answer(struct traffic *traffic, struct block *block, uint32_t length,
		     unsigned int control, unsigned int data)
{
	struct rest rest = content(block, length);
	uint64_t request_id = get_envelope(&rest, RENDEZVOUS_DONE, 1);
	uint64_t status = get(&rest, 16);

	if (!whole(&rest))
		return 0;
	int rc = fast_took_control(traffic, block, length, control, data);

	if (rc <= 0)
		return rc;
	rc = status ? 0 : fast_offer_over(traffic, (uint32_t)request_id, NULL);
	if (rc)
		return rc;
	PyObject *told =
		PyObject_CallMethod((PyObject *)traffic, "_answered", "KK",
				    (unsigned long long)request_id, (unsigned long long)status);
	Py_XDECREF(told);
	return told ? 1 : -1;
}

/* ---- the receiver ------------------------------------------------------------------------------ */

int fast_took_offer(struct traffic *traffic, struct block *block, uint32_t length,
		    unsigned int control, unsigned int data)
{
	struct offer offer;

	if (traffic->watching || !get_offer(content(block, length), &offer) ||
	    offer.length > traffic->longest || offer.length + FRAME_HEADER <= traffic->large_size ||
	    !fast_received_data((struct account *)traffic->account, control, data))
		return 0;
	traffic->used++;
	traffic->oversized++;
	fast_release_block(block);
	struct incoming *incoming = fast_new_incoming(&offer);

	if (!incoming)
		return -1;
	int rc = fast_offered(traffic, incoming);

	Py_DECREF((PyObject *)incoming);
	return rc ? -1 : 1;
}

int fast_answer_offer(struct traffic *traffic, unsigned int request_id)
{
	struct queue *queue = (struct queue *)traffic->queue;
	struct account *account = (struct account *)traffic->account;
	struct block *block = NULL;
	unsigned int control, data;

	if (fast_receives_are_plain(traffic) && PyObject_Size(traffic->controls) == 0 &&
	    account->control > RESERVE && queue->free && !queue->failed)
		block = fast_take_block((struct shelf *)traffic->shelf, FRAME_HEADER + LONGEST);
	if (!block)
		return PyErr_Occurred() ? -1 : 0;
	unsigned char *bytes = fast_block_bytes(block);
	unsigned char *end = put_envelope(bytes + FRAME_HEADER, RENDEZVOUS_DONE, request_id, 1);

	end = put(end, 0);
	struct frame *frame = fast_new_frame(block, (uint32_t)(end - bytes), 0);

	Py_DECREF((PyObject *)block);
	if (!frame)
		return -1;
	fast_spend_control(account, &control, &data);
	fast_put_header(bytes, FRAME_CONTROL, control, data, 0);
	int rc = fast_post_counted(traffic, frame);

	Py_DECREF((PyObject *)frame);
	return rc ? -1 : 1;
}

PyObject *fast_answer(PyObject *self, PyObject *number)
{
	unsigned long request_id = PyLong_AsUnsignedLong(number);

	if (PyErr_Occurred())
		return NULL;
	int said = fast_answer_offer((struct traffic *)self, (unsigned int)request_id);

	return said < 0 ? NULL : PyBool_FromLong(said);
}
