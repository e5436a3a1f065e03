/* The two-sided traffic of a connection: what is plain of it; see traffic.c, arrival.c, refill.c, inbox.c. */
#ifndef AIORDMA_FAST_TRAFFIC_H
#define AIORDMA_FAST_TRAFFIC_H

#include "account.h"
#include "frame.h"
#include "message.h"
#include "promise.h"

/* What a connection has done. */
struct counts {
	PyObject_HEAD
	unsigned long long messages_sent, messages_received;
	unsigned long long bytes_sent, bytes_received;
	unsigned long long reads, writes, atomics;
};

/* Messages that have arrived, in order, and the receivers that wait. */
struct inbox {
	PyObject_HEAD
	PyObject *incoming; /* a deque: messages, and what was offered */
	PyObject *receivers; /* a deque of promises */
	PyObject *table;
	PyObject *counts;
	PyObject *traffic; /* posts receives again; None or NULL: Python does */
	unsigned int woken; /* receivers that have been told and have not had their turn yet */
	unsigned int offers; /* in `incoming`: no messages yet */
	unsigned int unstarted; /* those of them that are not being read */
	unsigned long long
		ahead; /* bytes of what was offered, is read or has been, and was not taken */
	unsigned long long most_ahead; /* while no receiver waits */
	unsigned int taken; /* frames of which the last message has been, not yet told to Python */
	unsigned int refill; /* tell of so many */
	char ended;
};

/* What has been offered, and not answered for; see offering.c. */
struct offers {
	PyObject_HEAD
	struct offered *first,
		**end; /* in order; where the next one goes, NULL: it has not begun */
	unsigned int count, most;
	unsigned int forks; /* of which process it is */
	struct ibv_pd *domain;
	/* Of memory without holes; NULL: that is for Python. */
	struct ibv_mr *(*register_own)(struct ibv_pd *, void *, size_t, int);
	int (*deregister)(struct ibv_mr *);
};

/* What an offer says. */
struct offer {
	uint64_t request_id, address, rkey, length, imm;
	bool has_imm;
};

enum {
	OFFER_ROOM = 128
}; /* for the frame of one */

struct traffic {
	PyObject_HEAD
	PyObject *counts;
	PyObject *queue;
	PyObject *shelf;
	PyObject *account;
	PyObject *inbox;
	PyObject *offers;
	PyObject *message_type;
	PyObject *waiting; /* a deque of outgoing messages */
	PyObject *controls; /* control messages that wait, sized */
	PyObject *collected; /* to be called in the next turn of the loop */
	unsigned int under_way; /* frames with messages that are posted and not completed */
	unsigned int peer_size; /* bytes of the receive that the next frame comes into */
	unsigned long long max_message;
	unsigned int latest_request; /* its number */
	unsigned int sent; /* frames not yet told to Python */
	unsigned int used; /* receives, the same */
	unsigned int
		fitted; /* of these the latest ones in a row that small receives would do for */
	unsigned int
		oversized; /* of those used: for offers that fit no receives, and say nothing of them */
	unsigned int reposted; /* receives that were posted again, the same */
	unsigned int small_size; /* a frame that is no longer fits the small receives */
	unsigned int large_size; /* the same of the large ones */
	unsigned long long longest; /* message that is taken */
	unsigned int receive_size; /* of receives that are posted again; 0: that is for Python */
	unsigned int patience; /* so many may have been used up before Python has to look */
	char started;
	char ended;
	char closing; /* nothing is to be sent any more */
	char takes; /* frames with messages are accepted */
	char blocked; /* no memory now */
	char collecting; /* what is sent in this turn of the loop */
	char counting; /* Python wants to know of each frame that is sent */
	char grown; /* receives are larger than the small ones now */
	char watching; /* Python wants to know of each frame that arrives */
	char parting; /* draining: Python waits for the end */
};

extern PyTypeObject *fast_counts_type;
extern PyTypeObject *fast_inbox_type;
extern PyTypeObject *fast_offers_type;
extern PyTypeObject *fast_traffic_type;

/* object.method(argument), without an argument if that is NULL: 0, or -1 with an exception. */
static inline int fast_call(PyObject *object, PyObject *method, PyObject *argument)
{
	PyObject *done = PyObject_CallMethodObjArgs(object, method, argument, NULL);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* The next message, of which a reference is taken over.  -1 with an exception. */
int fast_arrived(struct inbox *inbox, PyObject *message);
/* What was offered is here: the message stands in its place.  -1 with an exception. */
int fast_put_message(struct inbox *inbox, PyObject *offered, PyObject *message);
/* A buffered message for a task in the right loop while no receiver waits; else None. */
PyObject *fast_take_here(struct inbox *inbox);

/* A frame of so many bytes: 0, or -1 with an exception. */
int fast_received(struct traffic *traffic, struct block *block, uint32_t length);

/* Sends what credits and room allow. */
int fast_pump(struct traffic *traffic);

/* A leased block for a frame: a reference; NULL, perhaps without an exception. */
struct block *fast_frame_block(struct traffic *traffic, unsigned long long size);

/* Posts a frame whose header is written.  -1 with an exception. */
int fast_post_counted(struct traffic *traffic, struct frame *frame);
/* The same of one with messages, or what stands for one. */
int fast_post_messages(struct traffic *traffic, struct frame *frame);

/* It is counted that a receive was used up, by so many bytes.  -1 with an exception. */
int fast_count_used(struct traffic *traffic, struct block *block, uint32_t length);

/* A CREDIT frame is due.  -1 with an exception. */
int fast_send_credits(struct traffic *traffic);

/* Whether a frame that is no message's, of so many bytes and with these credits, has been counted and its
 * receive posted again; else nothing has happened, and it is for Python.  -1 with an exception. */
int fast_took_control(struct traffic *traffic, struct block *block, uint32_t length,
		      unsigned int control, unsigned int data);

/* The same of a whole frame with an offer, and with the answer to one. */
int fast_took_offer(struct traffic *traffic, struct block *block, uint32_t length,
		    unsigned int control, unsigned int data);
int fast_took_answer(struct traffic *traffic, struct block *block, uint32_t length,
		     unsigned int control, unsigned int data);

/* The peer has as many to answer as it may have. */
bool fast_offers_full(const struct offers *offers);

/* Offers a message that may be sent now.  1: it is on its way, and the parcel taken over.  0: nothing has
 * happened, and it is for Python.  -1: an exception. */
int fast_offer(struct traffic *traffic, struct parcel *parcel, PyObject *waiter);

/* Posts the frame of an offer, in a leased block, whose lease it takes over.  -1 with an exception. */
int fast_send_offer(struct traffic *traffic, struct block *block, const struct offer *offer);

/* The peer has read it, or will not (the error is for its waiter).  1; 0: nothing of that number was
 * offered.  -1: an exception. */
int fast_offer_over(struct traffic *traffic, uint32_t request_id, PyObject *error);

/* Methods of the type: see _fast.pyi. */
PyObject *fast_request_id(PyObject *self, PyObject *unused);
PyObject *fast_traffic_offer_over(PyObject *self, PyObject *args);
PyObject *fast_post_offer(PyObject *self, PyObject *args);
PyObject *fast_answer(PyObject *self, PyObject *number);
PyObject *fast_traffic_offered(PyObject *self, PyObject *incoming);

/* A message has been read: 1 if that is said, 0 if it is for Python to say, -1 with an exception. */
int fast_answer_offer(struct traffic *traffic, unsigned int request_id);

/* Nothing has to be thought of but posting them again as they were. */
bool fast_receives_are_plain(const struct traffic *traffic);

/* The messages of *taken frames are the user's: posts receives for them, and leaves in *taken of how
 * many that is for Python.  -1 with an exception. */
int fast_refill(struct traffic *traffic, unsigned int *taken);

void fast_count_sent(struct traffic *traffic, unsigned int messages, unsigned long long bytes);

int fast_add_counts(PyObject *module);
int fast_add_arrival(void);
int fast_add_refill(void);
int fast_add_inbox(PyObject *module);
int fast_add_arrivals(PyObject *module);
int fast_add_offers(PyObject *module);
int fast_add_traffic(PyObject *module);

#endif
