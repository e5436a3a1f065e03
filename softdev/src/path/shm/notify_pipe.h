/* Notify pipes, with which two peers wake each other. Each direction has one pipe, and each
 * notification is one byte.
 *
 * The notifying side creates the pipe and keeps the write end, so no other process can make its
 * writes block. The notified side receives the read end, and opens it again through /proc/self/fd
 * (proc_pid_fd(5)). It would otherwise share the file description with the sender, which could make
 * it blocking at any time. A peer that fills or empties the pipe only disturbs its own
 * notifications. Writing a byte to a pipe takes two thirds of the time of sending a message on a
 * socket.
 */
#pragma once

#include "engine/engine.h"

struct soft_notify_pipe {
	int write_fd; /* write end of the pipe to the peer */
	/* Read end of the pipe to the peer. It stays open because writing to a pipe without readers
	 * raises SIGPIPE. */
	int read_fd;
	struct soft_fd_watch in; /* read end of the peer's pipe */
};

/* Initialize `pipe` without opening any descriptors. `notified` is called when the peer sends a
 * notification. */
void soft_notify_pipe_init(struct soft_notify_pipe *pipe,
			   void (*notified)(struct soft_fd_watch *watch));
/* Create the pipe to the peer. Returns 0 or an errno value. */
int soft_notify_pipe_make(struct soft_notify_pipe *pipe);
/* Watch the peer's pipe, whose read end is `fd`. Reopens the pipe, because the peer could change
 * the flags of `fd`. Always closes `fd`. Returns false on failure, for example if `fd` is not a
 * pipe. */
bool soft_notify_pipe_receive(struct soft_notify_pipe *pipe, int fd);
/* Notify the peer when the lock is released. */
void soft_notify_pipe_notify(const struct soft_notify_pipe *pipe);
/* Empty the pipe, so that epoll reports only later notifications. Returns false if the peer has
 * closed its end. */
bool soft_notify_pipe_drain(const struct soft_notify_pipe *pipe);
/* Close this side's ends of both pipes. */
void soft_notify_pipe_close(struct soft_notify_pipe *pipe);
