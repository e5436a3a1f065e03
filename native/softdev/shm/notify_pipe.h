/* How two local peers wake each other: a pipe in each direction, into which a byte is written.
 *
 * Who rings makes the pipe and keeps the end that is written to, so that nobody can make his writing
 * block; who is rung opens the pipe once more (/proc/self/fd, proc_pid_fd(5)), since the other one may
 * make the descriptor that has come from him, and is his as well, a blocking one at any time.
 * Somebody who fills the pipe, or empties it, is heard too often or not at all: it is his own bell.
 * This takes two thirds of the time of a message on a socket.
 */
#ifndef AIORDMA_SOFT_BELL_H
#define AIORDMA_SOFT_BELL_H

#include "engine/engine.h"

struct soft_notify_pipe {
	int write_fd;                  /* our end of what we ring */
	int read_fd; /* the other end, for the other side; kept, since writing to a
				    * pipe without readers is death (SIGPIPE) */
	struct soft_notify_fd in; /* what the other side writes to */
};

/* Nothing is open; `rung` is called when the other side rings. */
void soft_notify_pipe_init(struct soft_notify_pipe *pipe,
			   void (*notified)(struct soft_fd_watch *watch, uint32_t events));
/* Make the one that we ring: 0 or an errno value. */
int soft_notify_pipe_make(struct soft_notify_pipe *pipe);
/* The other side's, which is ours to close from now on: false if it is none. */
bool soft_notify_pipe_receive(struct soft_notify_pipe *pipe, int fd);
void soft_notify_pipe_notify(const struct soft_notify_pipe *pipe);
/* It has rung, perhaps: the next one will wake us again.  False: this is the end of it. */
bool soft_notify_pipe_drain(const struct soft_notify_pipe *pipe);
void soft_notify_pipe_close(struct soft_notify_pipe *pipe);

#endif
