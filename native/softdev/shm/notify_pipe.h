/* How two neighbours wake each other: a pipe in each direction, into which a byte is written.
 *
 * Who rings makes the pipe and keeps the end that is written to, so that nobody can make his writing
 * block; who is rung opens the pipe once more (/proc/self/fd, proc_pid_fd(5)), since the other one may
 * make the descriptor that has come from him, and is his as well, a blocking one at any time.
 * Somebody who fills the pipe, or empties it, is heard too often or not at all: it is his own bell.
 * This takes two thirds of the time of a message on a socket.
 */
#ifndef AIORDMA_SOFT_BELL_H
#define AIORDMA_SOFT_BELL_H

#include "softdev.h"

struct soft_bell {
	int rope;                  /* our end of what we ring */
	int end;                   /* the other end, for the other side; kept, since writing to a
				    * pipe without readers is death (SIGPIPE) */
	struct soft_source source; /* what the other side rings */
	struct soft_node node;     /* notify_fds.c: of all that can be rung */
};

/* Nothing is open; `rung` is called when the other side rings. */
void soft_bell_init(struct soft_bell *bell,
		    void (*rung)(struct soft_source *source, uint32_t events));
/* Make the one that we ring: 0 or an errno value. */
int soft_bell_make(struct soft_bell *bell);
/* The other side's, which is ours to close from now on: false if it is none. */
bool soft_bell_hang(struct soft_bell *bell, int fd);
void soft_bell_ring(const struct soft_bell *bell);
/* It has rung, perhaps: the next one will wake us again.  False: this is the end of it. */
bool soft_bell_hear(const struct soft_bell *bell);
void soft_bell_close(struct soft_bell *bell);

/* notify_fds.c: one more that can be rung, and one less (safe to repeat). */
void soft_bells_add(struct soft_bell *bell);
void soft_bells_remove(struct soft_bell *bell);

#endif
