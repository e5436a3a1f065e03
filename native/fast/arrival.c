/* Frames that come in.
 *
 * Plain is one with messages that keeps to the protocol, to its last byte, or one with credits alone, an
 * offer or the answer to one.  It is looked through as a whole before anything of it counts; every other
 * one goes to Python, which does what it asks, or says what is wrong with it.
 */
#include "traffic.h"

static PyObject *str_used, *str_received;

static PyObject *new_message(struct traffic *traffic, struct block *block, uint64_t offset,
			     uint64_t length, bool has_imm, uint32_t imm, bool last)
{
	PyObject *made =
		fast_new_message((PyTypeObject *)traffic->message_type, block, offset, length);
	struct message *message = (struct message *)made;

	if (message) {
		message->has_imm = has_imm;
		message->imm = imm;
		message->last = last;
	}
	return made;
}

/* Of the whole frame: how many messages are in it, 0 if anything is wrong with it. */
static uint32_t look_through(const unsigned char *bytes, uint32_t length)
{
	uint32_t offset = FRAME_HEADER, count = 0;

	while (offset < length) {
		if (length - offset < 8 || count == MOST_BUNDLED)
			return 0;
		uint32_t word = fast_get_word(bytes + offset),
			 imm = fast_get_word(bytes + offset + 4);
		uint64_t size = word & ~ENTRY_IMMEDIATE;
		uint64_t whole = 8 + ((size + 7) & ~7ULL);

		if (whole > length - offset || (imm && !(word & ENTRY_IMMEDIATE)))
			return 0;
		for (uint64_t i = 8 + size; i < whole; i++)
			if (bytes[offset + i])
				return 0;
		offset += (uint32_t)whole;
		count++;
	}
	return count;
}

static int unbundle(struct traffic *traffic, struct block *block, uint32_t count)
{
	const unsigned char *bytes = fast_block_bytes(block);
	uint32_t offset = FRAME_HEADER;
	int rc = 0;

	block->pinned.leases += count - 1;
	for (uint32_t i = 0; i < count; i++) {
		uint32_t word = fast_get_word(bytes + offset);
		uint32_t size = word & ~ENTRY_IMMEDIATE;
		PyObject *message =
			new_message(traffic, block, offset + 8, size, word & ENTRY_IMMEDIATE,
				    fast_get_word(bytes + offset + 4), i + 1 == count);

		if (!message || fast_arrived((struct inbox *)traffic->inbox, message))
			rc = -1;
		offset += 8 + ((size + 7) & ~7U);
	}
	return rc;
}

static int for_python(struct traffic *traffic, struct block *block, uint32_t length)
{
	PyObject *number = PyLong_FromUnsignedLong(length);
	PyObject *done = number ? PyObject_CallMethodObjArgs((PyObject *)traffic, str_received,
							     block, number, NULL)
				: NULL;

	Py_XDECREF(number);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

int fast_count_used(struct traffic *traffic, struct block *block, uint32_t length)
{
	bool fits = length <= traffic->small_size;

	if (!traffic->watching && (fits || traffic->grown)) {
		traffic->used++;
		traffic->fitted = fits ? traffic->fitted + 1 : 0;
		return 0;
	}
	PyObject *posted = PyLong_FromUnsignedLong(block->posted);
	PyObject *number = PyLong_FromUnsignedLong(length);
	PyObject *done = posted && number
				 ? PyObject_CallMethodObjArgs((PyObject *)traffic, str_used, posted,
							      number, NULL)
				 : NULL;

	Py_XDECREF(posted);
	Py_XDECREF(number);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* Of a frame without messages: as fast_took_control. */
static int took_other(struct traffic *traffic, struct block *block, uint32_t length,
		      unsigned int control, unsigned int data)
{
	switch (*fast_block_bytes(block)) {
	case FRAME_OFFER:
		return fast_took_offer(traffic, block, length, control, data);
	case FRAME_CONTROL:
		return fast_took_answer(traffic, block, length, control, data);
	default:
		return length == FRAME_HEADER && (control || data)
			       ? fast_took_control(traffic, block, length, control, data)
			       : 0;
	}
}

int fast_received(struct traffic *traffic, struct block *block, uint32_t length)
{
	const unsigned char *bytes = fast_block_bytes(block);

	if (!traffic->takes || length < FRAME_HEADER || length > block->size)
		return for_python(traffic, block, length);
	unsigned char kind = bytes[0];
	unsigned int control = bytes[1], data = bytes[2] | (unsigned int)bytes[3] << 8;
	uint32_t imm = fast_get_word(bytes + 4), count = 1;

	if (kind == FRAME_CREDIT || kind == FRAME_CONTROL || kind == FRAME_OFFER) {
		int took = imm ? 0 : took_other(traffic, block, length, control, data);

		return took < 0 ? -1
		       : took   ? fast_pump(traffic)
				: for_python(traffic, block, length);
	}
	if (kind == FRAME_BUNDLE)
		count = imm ? 0 : look_through(bytes, length);
	else if (kind != (FRAME_DATA | FRAME_IMMEDIATE) && (kind != FRAME_DATA || imm))
		count = 0;
	if (!count || !fast_received_data((struct account *)traffic->account, control, data))
		return for_python(traffic, block, length);
	int rc = fast_count_used(traffic, block, length);

	if (kind == FRAME_BUNDLE) {
		rc |= unbundle(traffic, block, count);
	} else {
		PyObject *message = new_message(traffic, block, FRAME_HEADER, length - FRAME_HEADER,
						kind & FRAME_IMMEDIATE, imm, true);
		if (!message || fast_arrived((struct inbox *)traffic->inbox, message))
			rc = -1;
	}
	return rc ? -1 : fast_pump(traffic);
}

int fast_add_arrival(void)
{
	str_used = PyUnicode_InternFromString("_count_used");
	str_received = PyUnicode_InternFromString("received");
	return str_used && str_received ? 0 : -1;
}
