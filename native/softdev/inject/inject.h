/* Faults on command: a plan for this process, and what follows from it in each room.
 *
 * The plan says how likely each kind of fault is, or which occurrence of it shall be.  Whether the
 * k-th frame of the n-th connection gets lost is a function of the seed, n and k alone: so the same
 * seed gives the same faults, whatever the threads and the other connections do meanwhile.
 */
#ifndef AIORDMA_SOFT_FAULT_H
#define AIORDMA_SOFT_FAULT_H

#include "objects/objects.h"

struct soft_link;

enum soft_fault {
	SOFT_FAULT_LOSS,      /* of a frame or datagram that comes in */
	SOFT_FAULT_DUPLICATE, /* it comes twice */
	SOFT_FAULT_JITTER,    /* only to draw numbers for it */
	SOFT_FAULT_RNR,       /* a request that needs a receive is told that there is none */
	SOFT_FAULT_CUT,       /* a connection breaks */
	SOFT_FAULT_OVERRUN,   /* a completion finds its queue full */
	SOFT_FAULT_REGISTER,  /* a registration finds no memory */
	SOFT_FAULT_HANDSHAKE, /* a message of the connection manager gets lost */
	SOFT_FAULTS,
};

/* Occurrences count from 1. */
struct soft_fault_when {
	double probability; /* 0: never */
	uint64_t first, last;
};

enum soft_fault_frames {
	SOFT_FAULT_REQUESTS = 1 << 0,
	SOFT_FAULT_ANSWERS = 1 << 1
};

struct soft_fault_plan {
	uint64_t seed;
	struct soft_fault_when when[SOFT_FAULTS];
	uint64_t delay_ns;
	uint64_t jitter_ns;
	uint64_t rate;      /* bytes that the device takes in per second; 0: no limit */
	uint64_t cut_after; /* bytes that a connection has taken in before it breaks */
	unsigned frames;    /* that may be lost or doubled: enum soft_fault_frames */
	uint32_t qp_num;    /* 0: all */
	uint32_t cq;        /* handle; 0: all */
};

extern bool soft_faults_set; /* there is a plan */
extern struct soft_fault_plan soft_faults;
extern struct aiordma_fault_counts soft_fault_counts;

/* fault_spec.c.  0, or EINVAL and what is wrong with which part. */
int soft_fault_parse(const char *text, struct soft_fault_plan *plan, char *error, size_t room);
/* What the environment asks for, the first time: 0, or EINVAL and it has been said on stderr. */
int soft_faults_of_environment(void);

/* fault.c.  The number that the seed has for this place, from 0 up to 1. */
double soft_fault_number(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence);
bool soft_fault_strikes(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
			uint64_t occurrence);
bool soft_fault_registration(void);
bool soft_fault_handshake(void);
bool soft_fault_fills(const struct soft_cq *cq);
bool soft_fault_refuses(struct soft_qp *qp); /* delay_queue.c */

/* For every completion, and every message that needs a receive. */
static inline bool soft_fault_overrun(const struct soft_cq *cq)
{
	return soft_faults_set && soft_fault_fills(cq);
}

static inline bool soft_fault_not_ready(struct soft_qp *qp)
{
	return soft_faults_set && soft_fault_refuses(qp);
}

/* delay_queue.c: the way that frames and datagrams take before they are taken in */
void soft_fault_attach(struct soft_link *link); /* it is up, or there is another plan */
/* It is up no more.  True: the other side's end had come already. */
bool soft_fault_detach(struct soft_link *link);
void soft_fault_input(struct soft_link *link, const uint8_t *data, size_t length);
/* The stream has ended; true if frames are still under way, after which the link is finished. */
bool soft_fault_outlives(struct soft_link *link, int error);
/* False: it is to be received at once. */
bool soft_fault_datagram(const struct soft_qp *qp, const struct soft_datagram *datagram,
			 const uint8_t *payload, uint32_t length);
void soft_faults_begin(void);  /* another plan: count anew */
void soft_faults_forget(void); /* datagrams that are under way */

#endif
