/* What is on its way out: messages that wait for their turn, and frames; see frame.c. */
#ifndef AIORDMA_FAST_FRAME_H
#define AIORDMA_FAST_FRAME_H

#include "block.h"
#include "queue.h"

enum {
	FRAME_HEADER = 8,
	FRAME_IMMEDIATE = 0x80,
	MOST_BUNDLED = 128,
};

#define ENTRY_IMMEDIATE ((uint32_t)1 << 31)

/* aiordma/_core/frames.py's, as far as they are plain. */
enum {
	FRAME_DATA = 1,
	FRAME_CONTROL = 2,
	FRAME_CREDIT = 3,
	FRAME_OFFER = 4,
	FRAME_BUNDLE = 5,
};

/* A number in a frame. */
static inline void fast_put_word(unsigned char *bytes, uint32_t word)
{
	for (int i = 0; i < 4; i++)
		bytes[i] = (unsigned char)(word >> 8 * i);
}

static inline uint32_t fast_get_word(const unsigned char *bytes)
{
	return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
	       (uint32_t)bytes[3] << 24;
}

/* The beginning of a frame, with the credits that go back. */
static inline void fast_put_header(unsigned char *bytes, unsigned char kind, unsigned int control,
				   unsigned int data, unsigned int imm)
{
	bytes[0] = kind;
	bytes[1] = (unsigned char)control;
	bytes[2] = (unsigned char)data;
	bytes[3] = (unsigned char)(data >> 8);
	fast_put_word(bytes + 4, imm);
}

/* The bytes of a message of the user, and the object that keeps them. */
struct parcel {
	PyObject *source; /* a reference: bytes, a buffer, or a leased block */
	Py_buffer buffer; /* of a buffer */
	const unsigned char *bytes;
	unsigned long long length;
	unsigned int imm;
	char has_imm;
	char has_buffer;
};

/* A message that waits for its turn. */
struct outgoing {
	PyObject_HEAD
	struct parcel parcel;
	PyObject *waiter;
	unsigned long long turn;
};

/* A frame in a block of the pool, posted or about to be; or its header, and a message where it lies. */
struct frame {
	struct work work;
	struct parcel parcel; /* that one */
	PyObject *block;      /* NULL: let go */
	PyObject *spares;     /* a list that the block belongs to; NULL: the pool */
	PyObject *traffic;    /* that of its messages; NULL: there are none */
	PyObject *one;     /* the waiter, if there is one */
	PyObject **waiters; /* if there are several */
	uint32_t count;
	unsigned int messages;   /* in it */
	unsigned long long bytes; /* of them */
};

extern PyTypeObject *fast_outgoing_type;
extern PyTypeObject *fast_frame_type;

/* 1: there they are.  0: for Python to find them.  -1: an exception. */
int fast_open_parcel(struct parcel *parcel, PyObject *data);
/* imm is a number, or None: 0, or -1 with an exception. */
int fast_parcel_imm(struct parcel *parcel, PyObject *imm);
void fast_close_parcel(struct parcel *parcel);

/* The one takes over what the other has, which is empty then. */
static inline void fast_move_parcel(struct parcel *to, struct parcel *from)
{
	*to = *from;
	from->source = NULL;
	from->has_buffer = 0;
}

/* Takes over the parcel: a new reference, or NULL. */
struct outgoing *fast_new_outgoing(struct parcel *parcel, PyObject *waiter);

/* For `count` waiters, which are to be filled in with references (`fast_frame_waiters`): takes over
 * the lease of the block.  NULL with an exception, and the block is released. */
struct frame *fast_new_frame(struct block *block, uint32_t length, uint32_t count);
PyObject **fast_frame_waiters(struct frame *frame);

/* The frame goes on with the parcel, which it takes over. */
void fast_frame_adds(struct frame *frame, struct parcel *parcel, unsigned int lkey);

/* Its end: 0, or -1 with an exception. */
int fast_frame_done(struct frame *frame);

int fast_add_frame(PyObject *module);

#endif
