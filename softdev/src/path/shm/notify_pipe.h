/* Notify pipes, through which two peers wake each other: one pipe per direction, and one byte per
 * notification.
 *
 * The notifying side creates the pipe and keeps the write end, so that no other process can make
 * its writes block. The notified side opens the pipe again (/proc/self/fd, proc_pid_fd(5)), because
 * it shares the descriptor that it received with the sender, which could make it blocking at any
 * time. A peer that fills or empties the pipe only disturbs its own notifications. Writing a byte
 * to a pipe takes two thirds of the time of a message on a socket.
 */
#pragma once

#include "engine/engine.h"

struct soft_notify_pipe {
	int write_fd; /* write end of the pipe to the peer */
	/* Read end of the pipe to the peer. Kept open because a write to a pipe without readers
	 * raises SIGPIPE. */
	int read_fd;
	struct soft_fd_watch in; /* read end of the peer's pipe */
};

/* Initialize without opening anything. `notified` is called when the peer notifies. */
void soft_notify_pipe_init(struct soft_notify_pipe *pipe,
			   void (*notified)(struct soft_fd_watch *watch));
/* Create the pipe to the peer. Returns 0 or an errno value. */
int soft_notify_pipe_make(struct soft_notify_pipe *pipe);
/* Adopt the read end of the peer's pipe and close `fd`. Returns false if it is not a pipe. */
bool soft_notify_pipe_receive(struct soft_notify_pipe *pipe, int fd);
/* Notify the peer when the lock is released. */
void soft_notify_pipe_notify(const struct soft_notify_pipe *pipe);
/* Empty the pipe, so that the next byte wakes this process again. Returns false if the peer has
 * closed it. */
bool soft_notify_pipe_drain(const struct soft_notify_pipe *pipe);
void soft_notify_pipe_close(struct soft_notify_pipe *pipe);
