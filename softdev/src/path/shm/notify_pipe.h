/* The notify pipe: how two peers wake each other, one pipe in each direction, a byte each time.
 *
 * The notifying side makes the pipe and keeps the write end, so that no other process can make its
 * writes block.  The notified side opens the pipe once more (/proc/self/fd, proc_pid_fd(5)),
 * because the descriptor that it received is shared with the sender, which could make it a blocking
 * one at any time.  A peer that fills or empties the pipe disturbs only its own notifications.  A
 * byte in a pipe takes two thirds of the time of a message on a socket.
 */
#pragma once

#include "engine/engine.h"

struct soft_notify_pipe {
	int write_fd; /* our end of the pipe that we write to */
	/* its other end, for the other side; kept open, since a write to a pipe without readers
	 * raises SIGPIPE */
	int read_fd;
	struct soft_fd_watch in; /* what the other side writes to */
};

/* Nothing is open; `notified` is called when the other side notifies. */
void soft_notify_pipe_init(struct soft_notify_pipe *pipe,
			   void (*notified)(struct soft_fd_watch *watch));
/* Make the pipe that we write to: 0 or an errno value. */
int soft_notify_pipe_make(struct soft_notify_pipe *pipe);
/* Take the read end of the other side's pipe, and close `fd`; false: it is no pipe. */
bool soft_notify_pipe_receive(struct soft_notify_pipe *pipe, int fd);
/* Once the lock has been given back. */
void soft_notify_pipe_notify(const struct soft_notify_pipe *pipe);
/* Empty the pipe; the next byte wakes us again.  False: the other side has closed it. */
bool soft_notify_pipe_drain(const struct soft_notify_pipe *pipe);
void soft_notify_pipe_close(struct soft_notify_pipe *pipe);
